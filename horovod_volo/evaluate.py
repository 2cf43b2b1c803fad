"""Tell the exact accuracy of a trained network: every image once, on one rank or many.

    python -m horovod_volo.evaluate /path/to/imagenet --weights runs/volo_d1
    horovodrun -np 8 python -m horovod_volo.evaluate /path/to/imagenet --weights runs/volo_d1 --real real.json
    python -m horovod_volo.evaluate /path/to/imagenetv2 --v2 --weights runs/volo_d1 --per-class 20 --json -

Exit status: 0 done; 1 a failure; 2 a mistake in the request, told in one message.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_volo.config.arguments import (
    Parser,
    add_binding,
    add_choice_of_weights,
    add_plugins,
    whole_number,
)
from horovod_volo.core.errors import UserError

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World
    from horovod_volo.evaluation.accuracy import EvalRequest, EvalResult
    from horovod_volo.evaluation.per_class import ClassScore

DONE = 0
STDOUT = "-"
ALL_CLASSES = sys.maxsize
WORST_CLASSES = 20

# What the work needs is imported where it runs: --help must answer at once.


def main(arguments: Sequence[str]) -> int:
    """Run one rank; return its exit status."""
    try:
        chosen = build_parser().parse_args(arguments)
    except UserError as problem:
        from horovod_volo.cluster.entry import refuse

        return refuse(problem)
    from horovod_volo.cluster.pinning import bind

    bound = bind(chosen.binding)
    from horovod_volo.cluster.entry import run_on_ranks

    return run_on_ranks(partial(_measure, chosen), bound)


def _measure(chosen: argparse.Namespace, world: World) -> int:
    from horovod_volo.core.messages import list_problems
    from horovod_volo.evaluation.accuracy import EvalRequest, check_writable, measure_accuracy
    from horovod_volo.monitor.pace import ThroughputLine
    from horovod_volo.plugins import load_plugins

    world.run_on_all_ranks(partial(load_plugins, ",".join(chosen.plugin)))
    question = EvalRequest(
        data_dir=chosen.data_dir,
        weights=chosen.weights,
        model=chosen.model,
        use_ema=chosen.use_ema,
        aux_head=chosen.aux_head,
        image_side=chosen.img_size,
        crop_pct=chosen.crop_pct,
        batch=chosen.batch_size,
        workers=chosen.workers,
        precision=chosen.precision,
        split=chosen.split,
        catalog_dir=chosen.catalog_dir,
        real=chosen.real,
        v2=chosen.v2,
    )
    if chosen.json not in ("", STDOUT):
        world.run_on_rank_zero(lambda: check_writable(chosen.json))
    whose = "images" if world.size == 1 else f"images of rank 0 of {world.size}"
    answer = measure_accuracy(question, world, ThroughputLine(whose, shown=world.is_rank_zero))
    if world.is_rank_zero:
        list_problems([f"left out: {text}" for text in answer.damage])
        if chosen.json != STDOUT:
            print(_text(question, answer, answer.classes[: chosen.per_class]), flush=True)
    record = _record(question, answer, world.size, answer.classes[: chosen.per_class])
    world.run_on_rank_zero(lambda: _write(chosen.json, json.dumps(record, indent=2)))
    return DONE


def _text(question: EvalRequest, answer: EvalResult, rows: Sequence[ClassScore]) -> str:
    counts, scores, network = answer.counts, answer.counts.scores(), answer.network
    facts = [
        ("weights", question.weights),
        ("model", f"{network.name}, {network.image_side} px, crop {answer.crop_pct:g}, {question.precision}"),
        *(("", remark) for remark in network.remarks),
        ("images", f"{counts.seen:,} of {answer.images}, and {counts.absent:,} damaged ones left out"),
        ("top-1", f"{scores['top1']:.3f} %, {counts.top1:,} images"),
        ("top-5", f"{scores['top5']:.3f} %, {counts.top5:,} images"),
        ("loss", f"{scores['loss']:.5f}"),
    ]
    if answer.real is not None:
        share = f"{answer.real.accuracy:.3f} %, {answer.real.right:,} of {answer.real.images:,} images"
        facts.append(("ReaL", share))
    lines = [f"{name:<10}{value}" for name, value in facts]
    return "\n".join([*lines, "", *_table(rows)] if rows else lines)


def _table(rows: Sequence[ClassScore]) -> list[str]:
    width = max(len("class"), *(len(row.name) for row in rows))
    lines = [f"{'class':<{width}}  images   right      %  most often taken for"]
    for row in rows:
        instead = f"{row.mistaken_for} ({row.mistaken})" if row.mistaken else "-"
        lines.append(f"{row.name:<{width}}  {row.images:>6}  {row.right:>6}  {row.top1:>5.1f}  {instead}")
    return lines


def _record(
    question: EvalRequest, answer: EvalResult, ranks: int, rows: Sequence[ClassScore]
) -> dict[str, Any]:
    counts, network = answer.counts, answer.network
    record: dict[str, Any] = {
        "weights": question.weights,
        "model": network.name,
        "data": answer.images,
        "use_ema": question.use_ema,
        "aux_head": network.has_aux_head,
        "img_size": network.image_side,
        "crop_pct": answer.crop_pct,
        "mean": network.mean,
        "std": network.std,
        "precision": question.precision,
        "batch_size": question.batch,
        "ranks": ranks,
        **counts.scores(),
        "top1_right": counts.top1,
        "top5_right": counts.top5,
    }
    if answer.real is not None:
        score = {"accuracy": answer.real.accuracy, **answer.real._asdict()}
        record["real"] = {"file": question.real, **score}
    if rows:
        record["classes"] = [{**row._asdict(), "top1": row.top1} for row in rows]
    return record


def _write(file: str, text: str) -> None:
    from horovod_volo.core.atomic_file import atomic_write

    if file == STDOUT:
        print(text, flush=True)
    elif file:
        try:
            with atomic_write(Path(file)) as opened:
                opened.write(f"{text}\n".encode())
        except OSError as error:
            raise UserError(f"--json cannot write {file}: {error.strerror}. Name another file.") from None


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = Parser(
        prog="horovodrun -np RANKS python -m horovod_volo.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA_DIR", help="folder that holds val/, as for training")
    add(
        "--weights",
        required=True,
        metavar="SOURCE",
        help="a run folder, a checkpoint, a file, or timm:NAME for the weights that timm publishes",
    )
    add("--model", default="", metavar="NAME", help="the network; default: as SOURCE tells, a file does not")
    add_plugins(parser)
    add_choice_of_weights(parser)
    add("--img-size", type=whole_number(1), default=0, metavar="N", help="default: as it was trained")
    add("--crop-pct", type=_share, default=0.0, metavar="X", help="default: the network's own")
    add("--batch-size", "-b", type=whole_number(1), default=64, metavar="N", help="per rank (%(default)s)")
    add("--workers", "-j", type=whole_number(1), default=0, metavar="N", help="data threads; default: cores")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="(%(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--split", choices=("train", "val"), default="val", help="images (%(default)s)")
    which.add_argument("--v2", action="store_true", help="DATA_DIR is of ImageNet-V2: folders 0 to 999")
    add("--real", default="", metavar="FILE", help="tell the ImageNet-ReaL accuracy too, of its real.json")
    add(
        "--per-class",
        type=_classes,
        nargs="?",
        const=WORST_CLASSES,
        default=0,
        metavar="N",
        help=f"tell of so many classes, the worst first, or of 'all'; without a number {WORST_CLASSES}",
    )
    add_binding(parser)
    add("--json", default="", metavar="FILE", help="write all this to a file; - instead of the text")
    add(
        "--catalog-dir",
        default="",
        metavar="DIR",
        help="where several ranks share the list of images (runs/catalogs)",
    )
    return parser


def _classes(text: str) -> int:
    return ALL_CLASSES if text == "all" else whole_number(1, because="; or all")(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 100:
        raise argparse.ArgumentTypeError(f"takes a number such as 0.96, not {text!r}")
    return share


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
