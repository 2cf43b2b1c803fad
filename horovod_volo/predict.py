"""Predict the classes of images with a trained network, in one process, without Horovod and DALI.

    horovod-volo predict runs/volo_d1 photo.jpg
    horovod-volo predict runs/volo_d1 photos/ --top 3 --format csv > predictions.csv
    find photos -name '*.jpg' | horovod-volo predict runs/volo_d1 - --html predictions.html

Exit status: 0 done; 1 some images cannot be read; 2 a mistake in the command line, explained in one message.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags, whole_number
from horovod_volo.config.schema import setting_of_training
from horovod_volo.config.setting import Setting
from horovod_volo.core.errors import UserError, escape_controls, list_problems, refuse_mistakes
from horovod_volo.evaluation import flags_of_trained_network

if TYPE_CHECKING:
    from horovod_volo.evaluation.predictions import Classes

DONE, LEFT_OUT = 0, 1
_STDIN = "-"

# Heavy modules are imported where they are used, so that --help answers at once.


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Predict, and print the result; return the exit status."""
    try:
        return _predict(build_parser().parse_args(arguments))
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def build_parser() -> Parser:
    parser = Parser(prog="horovod-volo predict", description=__doc__)
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", help="a run folder, a checkpoint, a file, or timm:NAME")
    add("images", nargs="+", metavar="IMAGE", help="a file, a folder with images, or '-': names from stdin")
    add("--top", type=whole_number(1), default=5, metavar="K", help="classes of each image (default: 5)")
    kinds = Literal["table", "json", "csv"]
    add_flags(parser, Setting(name="format", kind=kinds, default="table", help="what is printed"))
    add("--html", default="", metavar="FILE", help="also write a page with the images and their classes")
    add_flags(
        parser,
        *flags_of_trained_network(),
        setting_of_training("crop_pct"),
        setting_of_training("batch_size", help="images per batch"),
        setting_of_training("precision", help="arithmetic of the forward pass"),
    )
    return parser


def _predict(options: argparse.Namespace) -> int:
    from horovod_volo.evaluation.predictions import load_network, predict, write_contact_sheet
    from horovod_volo.plugins import load_plugins

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files are bytes
    load_plugins(options.plugin)
    bad = list[str]()
    files = _files(options.images, bad)
    trained = load_network(options.weights, options)
    list_problems(trained.messages)
    how = {name: getattr(options, name) for name in ("top", "crop_pct", "batch_size", "precision")}
    predictions: list[tuple[Path, Classes]] = []
    write_row = csv.writer(sys.stdout).writerow
    if options.format == "csv":
        write_row(["file", "rank", "class", "probability"])
    for number, classes in predict(trained, files, bad, **how):
        predictions.append((files[number], classes))
        if options.format == "table":
            listed = ", ".join(f"{name} {100 * share:.1f} %" for name, share in classes)
            print(escape_controls(f"{files[number]}: {listed}"), flush=True)
        elif options.format == "csv":
            for rank, (name, share) in enumerate(classes, start=1):
                write_row([files[number], rank, name, f"{share:.6f}"])
    if options.format == "json":
        print(json.dumps([_record(*each) for each in predictions], indent=2))
    if options.html:
        write_contact_sheet(Path(options.html), options.weights, predictions)
    list_problems([f"left out: {text}" for text in bad])
    return LEFT_OUT if bad else DONE


def _record(file: Path, classes: Classes) -> dict[str, Any]:
    named = [{"class": name, "probability": round(share, 6)} for name, share in classes]
    return {"file": str(file), "classes": named}


def _files(given: Sequence[str], bad: list[str]) -> list[Path]:
    """Return the images that are named, and note what cannot be listed; raise UserError without images."""
    from horovod_volo.data.images.split_folder import is_image, paths_below
    from horovod_volo.data.reading import IMAGE_ENDINGS

    lines = os.fsdecode(sys.stdin.buffer.read()).splitlines() if _STDIN in given else []
    files = list[Path]()
    for name in [each for each in (*given, *lines) if each and each != _STDIN]:
        path = Path(name)
        if not path.exists():
            raise UserError(f"there is no image or folder {name}.")
        inside = sorted(path / each for each in paths_below(path, bad)) if path.is_dir() else [path]
        files += [each for each in inside if each == path or (is_image(each.name) and not each.is_dir())]
    if not files:
        list_problems(bad)
        raise UserError(
            f"there are no images in {', '.join(given)}: none ends in {', '.join(IMAGE_ENDINGS)}."
        )
    return files


if __name__ == "__main__":
    run_until_signal(main, "the prediction is stopped")
