"""Evaluate a trained network exactly: every image once, on one rank or many.

    horovod-volo evaluate /path/to/imagenet --weights runs/volo_d1
    horovodrun -np 8 horovod-volo evaluate /path/to/imagenet --weights runs/volo_d1 --real real.json
    horovod-volo evaluate /path/to/imagenetv2 --v2 --weights runs/volo_d1 --per-class 20 --json -

Exit status: 0 done; 1 a failure; 2 a mistake in the command line or the data, explained in one message.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from horovod_volo.cluster.entry import refuse, run_on_ranks
from horovod_volo.cluster.launcher import start_ranks
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags, add_ranks, flags_of, whole_number
from horovod_volo.config.schema import setting_of_training
from horovod_volo.config.setting import Setting
from horovod_volo.core.errors import UserError, escape_controls, list_problems
from horovod_volo.evaluation import flags_of_trained_network

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World
    from horovod_volo.evaluation.task_results import Evaluated

DONE = 0
STDOUT = "-"
ALL_CLASSES = sys.maxsize
WORST_CLASSES = 20
_FLAGS_OF_TASKS = {
    **dict.fromkeys(("model", "img_size", "aux_head", "mean", "std"), ("classification",)),
    **dict.fromkeys(("crop_pct", "real", "v2", "cache_dir"), ("classification",)),
    **dict.fromkeys(("scales", "flip"), ("segmentation",)),
    "predictions": ("segmentation", "detection"),
    "image_decoder": ("classification", "detection"),
}

# Heavy modules are imported where they are used, so that --help answers at once.


def main(arguments: Sequence[str]) -> int:
    """Evaluate on one rank; return its exit status."""
    try:
        options = build_parser().parse_args(arguments)
        start_ranks(options.ranks, "horovod_volo.evaluate", arguments)
    except UserError as problem:
        return refuse(problem)
    from horovod_volo.cluster.pinning import bind

    return run_on_ranks(partial(_evaluate, options), bind(options.binding), flags_of(options))


def _evaluate(options: argparse.Namespace, world: World) -> int:
    """Evaluate, print and write the result. Collective: every rank calls this."""
    from horovod_volo.evaluation.task_results import EVALUATIONS
    from horovod_volo.models.pretrained import task_of
    from horovod_volo.monitor.progress import ThroughputLine
    from horovod_volo.plugins import load_plugins

    world.run_on_all_ranks(partial(load_plugins, options.plugin))
    if options.json not in ("", STDOUT):
        world.run_on_rank_zero(lambda: _check_writable(options.json))
    task = task_of(options.weights)
    world.run_on_all_ranks(partial(_refuse_flags_of_others, options, task))
    evaluate = world.run_on_all_ranks(partial(EVALUATIONS.find, task))
    counted = "images" if world.size == 1 else f"images of rank 0 of {world.size}"
    result = evaluate(options, world, ThroughputLine(counted, shown=world.is_rank_zero))
    world.run_on_rank_zero(lambda: _report(options.json, result))
    return DONE


def _check_writable(file: str) -> None:
    """Raise UserError if the file of `--json` cannot be created, before the evaluation starts."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(f"--json cannot write {file}. Name a file in an existing, writable folder.")


def _refuse_flags_of_others(options: argparse.Namespace, task: str) -> None:
    """Raise UserError for a flag that networks of this task do not read."""
    parser = build_parser()
    for name, tasks in _FLAGS_OF_TASKS.items():
        if task not in tasks and getattr(options, name) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is for {' and '.join(tasks)}, but {options.weights} is for {task}.")


def _report(file: str, result: Evaluated) -> None:
    """Print the result, and write it to the file of `--json`."""
    from horovod_volo.core.atomic_file import write_text

    list_problems([f"left out: {text}" for text in result.bad_samples])
    text = json.dumps(result.record, indent=2) + "\n"
    if file == STDOUT:
        print(text, end="", flush=True)
        return
    print("\n".join(map(escape_controls, result.lines)), flush=True)
    if file:
        write_text(Path(file), text, "--json")


def build_parser() -> Parser:
    """Build the parser. Settings that training has too come from the schema."""
    parser = Parser(prog="horovod-volo evaluate", description=__doc__)
    add = parser.add_argument
    add_flags(parser, setting_of_training("data_dir", help="folder with val/CLASS/IMAGE"))
    weights = "a run folder, a checkpoint, a file, or timm:NAME for the weights that timm publishes; required"
    add("--weights", required=True, metavar="SOURCE", help=weights)
    add_flags(
        parser,
        *flags_of_trained_network(),
        setting_of_training("crop_pct"),
        setting_of_training("batch_size", help="images per rank and batch"),
        setting_of_training("workers"),
        setting_of_training("image_decoder"),
        setting_of_training("precision", help="arithmetic of the forward pass"),
    )
    images = parser.add_mutually_exclusive_group()
    split = Setting(name="split", kind=Literal["train", "val"], default="val", help="split of DATA_DIR")
    add_flags(images, split)
    version2 = "DATA_DIR is ImageNet-V2: class folders 0 to 999 without splits"
    images.add_argument("--v2", action="store_true", help=version2)
    add("--real", default="", metavar="FILE", help="also compute ImageNet-ReaL accuracy from its real.json")
    worst = f"list the N classes of lowest accuracy, or 'all'; no number: {WORST_CLASSES} (default: none)"
    count = whole_number(1, all=ALL_CLASSES)
    add("--per-class", type=count, nargs="?", const=WORST_CLASSES, default=0, metavar="N", help=worst)
    add("--json", default="", metavar="FILE", help="also write the result as JSON; '-': print JSON only")
    add_ranks(parser)
    catalog = "folder for the list of images, seen by all hosts; empty: runs/catalogs, where several ranks "
    add_flags(
        parser,
        setting_of_training("binding"),
        setting_of_training("catalog_dir", help=f"{catalog}share the list"),
        setting_of_training("cache_dir"),
        setting_of_training("cache_gib"),
    )
    add = parser.add_argument_group("segmentation and detection").add_argument
    factors = "factors of the run's --scene-size, whose probabilities are averaged (default: 1)"
    add("--scales", type=float, nargs="+", default=[1.0], metavar="X", help=factors)
    add("--flip", action="store_true", help="average with the prediction of mirrored images")
    predictions = "write predicted classes as PNG, or boxes as JSON"
    add("--predictions", default="", metavar="FOLDER", help=predictions)
    return parser


if __name__ == "__main__":
    run_until_signal(main, "the evaluation is stopped, and wrote no result")
