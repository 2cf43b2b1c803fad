"""Export a trained network as a folder that timm loads and, with --onnx, as an ONNX file for other runtimes.

    horovod-volo export runs/volo_d1 /path/to/export
    horovod-volo export runs/volo_d1 /path/to/export --onnx --batch 8
    horovod-volo export weights.pth.tar /path/to/export --model volo_d1 --img-size 384

SOURCE is a run folder, one of its checkpoints, a file of weights, or timm:NAME. The export is loaded again
and its logits are compared with the network's; FOLDER is created only if they agree.
Exit status: 0 done; 1 the outputs differ; 2 a mistake, explained in one message.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags, whole_number
from horovod_volo.config.setting import Setting
from horovod_volo.core.errors import UserError, escape_controls, print_error, refuse_mistakes
from horovod_volo.evaluation import flags_of_trained_network

if TYPE_CHECKING:
    from torch import nn

    from horovod_volo.dense.trained import TrainedDense
    from horovod_volo.models.onnx_export import Sides
    from horovod_volo.models.pretrained import PretrainedModel

DONE, DIFFERS = 0, 1
_TIMM_TOLERANCE, _ONNX_TOLERANCE = 1e-5, 1e-4
_ANY_BATCH = 0
_OTHER_SIZES = ((45, 93), (128, 80))  # height and width; a model with dynamic sides is compared with them too

# Heavy modules are imported where they are used, so that --help answers at once.


class DifferentLogitsError(Exception):
    """The exported files give other logits than the network."""


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Export one network; return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        export(options)
    except OSError as problem:
        raise UserError(f"cannot export to {options.folder}: {problem}. Nothing was written.") from None
    except DifferentLogitsError as problem:
        print_error(f"error: {problem} Nothing was written.")
        return DIFFERS
    return DONE


def build_parser() -> Parser:
    parser = Parser(prog="horovod-volo export", description=__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the weights")
    add("folder", type=Path, metavar="FOLDER", help="folder to create")
    add_flags(parser, *flags_of_trained_network())
    onnx = "also write model.onnx; of segmentation for images of any size, or of --img-size if that is given"
    add("--onnx", action="store_true", help=onnx)
    batch = "batch size of model.onnx, images, or 'dynamic' (default: dynamic)"
    add("--batch", type=whole_number(1, dynamic=_ANY_BATCH), default=_ANY_BATCH, metavar="N", help=batch)
    text = "ONNX opset version of model.onnx, 18 to 23"  # those of torch's exporter; most runtimes read 18
    add_flags(parser, Setting(name="opset", kind=int, default=18, at_least=18, below=24, help=text))
    add("--force", action="store_true", help="replace an existing export in FOLDER")
    return parser


def export(options: argparse.Namespace) -> None:
    """Export the network that the parsed options name; raise DifferentLogitsError if the result differs."""
    from horovod_volo.evaluation.predictions import load_network
    from horovod_volo.models import onnx_export, timm_export
    from horovod_volo.models.pretrained import task_of
    from horovod_volo.plugins import load_plugins

    load_plugins(options.plugin)
    if options.onnx:
        onnx_export.check_packages()
    source = Path(options.source)
    if source.exists() and options.folder.resolve() in (source.resolve(), source.resolve().parent):
        raise UserError(f"{options.folder} holds the weights to export. Name another folder.")
    timm_export.check_folder(options.folder, replace=options.force)
    task = task_of(options.source)
    if task != "classification":
        _export_dense(options, task)
        return
    trained = load_network(options.source, options)
    with _new_folder(options, trained, trained.name) as exported:
        timm_export.write_timm_folder(trained, exported)
        difference = timm_export.timm_difference(trained, exported)
        if difference is not None:
            _check_difference("timm", difference, _TIMM_TOLERANCE)
        if options.onnx:
            _write_onnx(trained, trained.network, ["logits"], exported, options)
    print(timm_export.how_timm_loads(trained, options.folder))


def _export_dense(options: argparse.Namespace, task: str) -> None:
    """Export a network for pixels or boxes."""
    from horovod_volo.evaluation.task_results import EXPORTS
    from horovod_volo.models.timm_export import fixed_images

    if options.model or options.aux_head != "auto" or options.mean or options.std:
        raise UserError(
            "--model, --aux-head, --mean and --std are for networks of classification. Drop them."
        )
    trained: TrainedDense = EXPORTS.find(task)(options.source, options.img_size, options.use_ema)
    with _new_folder(options, trained, f"{task} by {trained.config.model.model}") as exported:
        trained.write(exported)
        difference = trained.reloaded_difference(exported, fixed_images(2, trained.image_side))
        _check_difference("torch", difference, _TIMM_TOLERANCE)
        if options.onnx:
            is_dynamic = trained.takes_any_size and not options.img_size
            _write_onnx(trained, *trained.outputs(), exported, options, "dynamic" if is_dynamic else "fixed")


@contextmanager
def _new_folder(
    options: argparse.Namespace, trained: PretrainedModel | TrainedDense, what: str
) -> Iterator[Path]:
    """Print what was loaded; yield the folder to write into, which exists at the end of the block."""
    from horovod_volo.models.timm_export import atomic_folder

    unnamed = [] if trained.class_names else ["the weights hold no names of classes, nor will the export"]
    for message in trained.messages + unnamed:
        print(escape_controls(message))
    with atomic_folder(options.folder, replace=options.force) as exported:
        yield exported
        names = sorted(file.name for file in exported.iterdir())
    print(f"{options.folder}: {what} at {trained.image_side} pixels: {', '.join(names)}")


def _write_onnx(
    trained: PretrainedModel | TrainedDense,
    network: nn.Module,
    outputs: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
    sides: Sides = "fixed",
) -> None:
    from horovod_volo.models.onnx_export import onnx_difference, write_onnx
    from horovod_volo.models.timm_export import ONNX

    file, batch, side = folder / ONNX, options.batch, trained.image_side
    properties = {"classes": trained.class_names, "mean": trained.mean, "std": trained.std}
    how: dict[str, Any] = {"image_side": side, "batch": batch, "opset": options.opset, "sides": sides}
    write_onnx(network, file, outputs=outputs, properties=properties, **how)
    batches = [(images, side, side) for images in ([batch] if batch else [1, 3])]
    batches += [(batch or 2, *size) for size in _OTHER_SIZES] if sides == "dynamic" else []
    difference = onnx_difference(network, file, batches)
    if difference is None:
        print(f"onnxruntime is not installed: {ONNX} was not compared with the network.")
    else:
        _check_difference("onnxruntime", difference, _ONNX_TOLERANCE)


def _check_difference(runtime: str, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:  # true of NaN too
        raise DifferentLogitsError(
            f"{runtime} gives outputs that differ by {difference:.1e}, more than {tolerance:.0e}."
        )
    print(f"{runtime}: outputs differ by {difference:.1e} at most")


if __name__ == "__main__":
    run_until_signal(main, "the export is stopped, and wrote nothing")
