"""Put a trained network into a folder that timm loads, and into an ONNX file for other runtimes.

    tools/export runs/volo_d1 /path/to/export
    tools/export runs/volo_d1 /path/to/export --onnx --batch 8
    tools/export weights.pth.tar /path/to/export --model volo_d1 --img-size 384

SOURCE is a run folder, one of its checkpoints, a file of weights, or timm:NAME. The folder appears when
everything in it is written and was compared with the network.
Exit status: 0 done; 1 what was written gives other logits; 2 a mistake, told in one message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_volo.config.arguments import add_choice_of_weights, add_plugins, whole_number
from horovod_volo.core.errors import UserError

if TYPE_CHECKING:
    from horovod_volo.models.pretrained import PretrainedModel

DONE, DIFFERS, MISTAKE = 0, 1, 2
_TIMM_TOLERANCE, _ONNX_TOLERANCE = 1e-5, 1e-4
_ANY_BATCH = 0
_OLDEST_OPSET, _NEWEST_OPSET = 18, 23  # that torch's exporter writes by itself; most programs read the oldest

# What the export needs is imported where it runs: --help must answer at once.


class DifferentLogitsError(Exception):
    """What was written is not the network."""


def main(arguments: Sequence[str]) -> int:
    """Export one network; return the exit status."""
    chosen = build_parser().parse_args(arguments)
    try:
        _export(chosen)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE
    except OSError as problem:
        print(f"error: cannot export to {chosen.folder}: {problem}. Nothing was written.", file=sys.stderr)
        return MISTAKE
    except DifferentLogitsError as problem:
        print(f"error: {problem} Nothing was written.", file=sys.stderr)
        return DIFFERS
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="the weights")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the export goes")
    parser.add_argument("--model", default="", metavar="NAME", help="network, where SOURCE does not tell")
    parser.add_argument(
        "--img-size",
        type=whole_number(1),
        default=0,
        metavar="SIDE",
        help="side of its images (the one it was trained at)",
    )
    add_plugins(parser)
    add_choice_of_weights(parser)
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too")
    parser.add_argument(
        "--batch",
        type=_batch,
        default=_ANY_BATCH,
        metavar="N",
        help="images in a batch of model.onnx, or `dynamic` for any number (dynamic)",
    )
    parser.add_argument(
        "--opset",
        type=whole_number(_OLDEST_OPSET, _NEWEST_OPSET),
        default=_OLDEST_OPSET,
        metavar="N",
        help=f"version of ONNX's operations, {_OLDEST_OPSET} to {_NEWEST_OPSET} (%(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace an export that is in FOLDER")
    return parser


def _batch(text: str) -> int:
    return _ANY_BATCH if text == "dynamic" else whole_number(1, because="; or dynamic")(text)


def _export(chosen: argparse.Namespace) -> None:
    from horovod_volo.models import onnx_export, timm_export
    from horovod_volo.models.pretrained import load_pretrained
    from horovod_volo.plugins import load_plugins

    load_plugins(",".join(chosen.plugin))
    if chosen.onnx:
        onnx_export.check_packages()
    timm_export.check_folder(chosen.folder, replace=chosen.force)
    trained = load_pretrained(
        chosen.source,
        name=chosen.model,
        image_side=chosen.img_size,
        use_ema=chosen.use_ema,
        aux_head=chosen.aux_head,
    )
    for remark in trained.remarks:
        print(remark)
    with timm_export.whole_folder(chosen.folder, replace=chosen.force) as made:
        timm_export.write_timm_folder(trained, made)
        _compare_with_timm(trained, made)
        if chosen.onnx:
            _write_onnx(trained, made, chosen)
        names = sorted(file.name for file in made.iterdir())
    print(f"{chosen.folder}: {trained.name} at {trained.image_side} pixels: {', '.join(names)}")
    print(timm_export.how_timm_loads(trained.name, chosen.folder))


def _compare_with_timm(trained: PretrainedModel, folder: Path) -> None:
    from horovod_volo.models.timm_export import timm_difference

    difference = timm_difference(trained, folder)
    if difference is not None:
        _judge("timm", difference, _TIMM_TOLERANCE)


def _write_onnx(trained: PretrainedModel, folder: Path, chosen: argparse.Namespace) -> None:
    from horovod_volo.models.onnx_export import onnx_difference, write_onnx
    from horovod_volo.models.timm_export import ONNX

    file, side = folder / ONNX, trained.image_side
    write_onnx(trained.network, file, image_side=side, batch=chosen.batch, opset=chosen.opset)
    batches = [chosen.batch] if chosen.batch else [1, 3]
    difference = onnx_difference(trained.network, file, image_side=side, batches=batches)
    if difference is None:
        print(f"onnxruntime is not installed: {ONNX} was not compared with the network.")
    else:
        _judge("onnxruntime", difference, _ONNX_TOLERANCE)


def _judge(reader: str, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:  # not a number is no agreement either
        raise DifferentLogitsError(
            f"{reader} gives logits that differ by {difference:.1e}, more than {tolerance:.0e}."
        )
    print(f"{reader}: logits differ by {difference:.1e} at most")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
