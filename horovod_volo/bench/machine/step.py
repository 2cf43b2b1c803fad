"""Speed of the engine's training step on random images, the time of its parts, and a GPU's utilisation.

Whole steps run unchanged. The parts are timed in a separate run, which waits for the device at the end of
each part and therefore takes slightly longer in total.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated

import torch
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, Kernels, Model, Pairs, Precision
from horovod_volo.bench.comparison import WrongResultError, assert_agree, repeats_for, timed, wait_for
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import (
    RANDOM_LABELS,
    checked_config,
    losses_of,
    random_batch,
    step_of,
    synthetic_context,
)
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import Labels, TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from horovod_volo.models.compiled import check_compiler, compile_blocks
from horovod_volo.monitor.meters import LossMeter
from horovod_volo.objective.loss import LossParts
from horovod_volo.objective.mixing import Mix

CLASSES = 1000
# Measured on one H200: bf16 product of 8192 x 8192 matrices of random values. The data sheet says 989.
PEAK_TFLOPS = 790.0
# Forward and backward of one image: three times the forward, whose operations are counted layer by layer.
# Recomputation and drop path do not change it.
TRAIN_GFLOP = {
    ("volo_d1", 224): 41.5,
    ("volo_d2", 224): 85.8,
    ("volo_d3", 224): 124.4,
    ("volo_d4", 224): 265.6,
    ("volo_d5", 224): 433.8,
    ("volo_d5", 448): 1888.0,
    ("volo_d5", 512): 2547.0,
}
_FIRST_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # relative to the largest loss
_SPLIT_STEPS = 9


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.0,
    kernels: Kernels = "fused",
    compile: Annotated[bool, Flag("compile the network's blocks")] = False,
    pairs: Pairs = 7,
) -> Result:
    """Measure a model's step. Collective: every rank calls this."""
    settings = {
        "model": model,
        "img_size": img_size,
        "batch_size": batch_size,
        "precision": precision,
        "drop_path": drop_path,
        "kernels": kernels,
        "compile": compile,
    }
    config = checked_config(settings | RANDOM_LABELS)
    world = World.connect()
    eager = _first_losses(config, world) if compile else None
    context = synthetic_context(config, world, CLASSES)
    device = context.resources.device
    try:
        if compile:
            check_compiler()
            compile_blocks(context.state.model)
        batch = random_batch(config, CLASSES, device, seed=world.rank)
        began = perf_counter()
        losses = losses_of(context, batch, _FIRST_STEPS)
        first_seconds = perf_counter() - began
        if eager is not None:
            what = f"the losses of {_FIRST_STEPS} steps, with blocks compiled and without"
            assert_agree(what, losses, eager, _TOLERANCES[precision])
        seconds = _whole_steps(context, batch, pairs)
        of_gpu = _gpu_figures(model, img_size, [batch_size / value for value in seconds], device)
        parts = _parts_of_steps(context, batch)
        _assert_finite(context)
    finally:
        context.close()
    figures = [
        Figure.of_rate("images a second", seconds, batch_size * world.size),
        Figure.of_seconds("whole step", seconds),
        *(Figure.of_seconds(name, parts[name]) for name in parts),
        Figure(f"first {_FIRST_STEPS} steps", first_seconds, "s"),
        *of_gpu,
    ]
    images = f"{world.size} x {batch_size} random images"
    title = f"training step, {img_size} px, {precision}, {images}, drop path {drop_path}"
    form = " compiled" if compile else " plain" if kernels == "plain" else ""
    return Result(f"step {model} {img_size}{form}", title, figures)


def share_of_peak(model: str, img_size: int, images_per_second: float) -> float:
    """Return the percentage of the peak FLOP/s that a rank's speed amounts to (model FLOPs utilisation)."""
    return 100 * images_per_second * TRAIN_GFLOP[model, img_size] / (1e3 * PEAK_TFLOPS)


def _gpu_figures(model: str, img_size: int, rates: Sequence[float], device: torch.device) -> list[Figure]:
    if device.type != "cuda":
        return []
    figures = [Figure("most memory held", torch.cuda.max_memory_allocated(device) / 2**30, "GiB")]
    if (model, img_size) in TRAIN_GFLOP:
        shares = [share_of_peak(model, img_size, rate) for rate in rates]
        figures.append(Figure.of(f"share of {PEAK_TFLOPS:.0f} TFLOP/s", shares, "%"))
    return figures


def _first_losses(config: Config, world: World) -> Tensor:
    """Return the losses of the first steps without compiled blocks."""
    context = synthetic_context(config, world, CLASSES)
    batch = random_batch(config, CLASSES, context.resources.device, seed=world.rank)
    losses = losses_of(context, batch, _FIRST_STEPS)
    context.close()
    return losses


def _whole_steps(context: TrainContext, batch: TrainBatch, blocks: int) -> list[float]:
    """Return the seconds of a step in each block."""
    action = step_of(context, batch)
    # A step is a collective, so all ranks take the number of repeats from rank 0.
    repeats = context.world.broadcast_object(repeats_for(action, context.resources.device))
    block = timed(action, repeats, context.resources.device)
    return [block() for _ in range(blocks)]


def _parts_of_steps(context: TrainContext, batch: TrainBatch) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, step by step."""
    stopwatch = _Stopwatch(context.resources.device)

    def loss(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Mix) -> LossParts:
        parts = context.loss(class_logits, token_logits, labels, box)
        stopwatch.lap("forward and loss")
        return parts

    # The engine's step calls these at the end of its parts; in fp16 unscaling counts as exchange.
    marked = dataclasses.replace(
        context,
        loss=loss,
        meter=_MarkedMeter(context.resources.device, stopwatch),
        clip=lambda: stopwatch.lap("exchange wait"),
    )
    micro_batches = itertools.repeat(batch)
    for _ in range(_SPLIT_STEPS):
        stopwatch.start()
        train_step(marked, micro_batches)
        stopwatch.lap("update")
    return stopwatch.seconds


class _Stopwatch:
    """Seconds between the ends of successive parts, each on an idle device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._device = device

    def start(self) -> None:
        wait_for(self._device)
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        before = self._last
        self.start()
        self.seconds.setdefault(name, []).append(self._last - before)


class _MarkedMeter(LossMeter):
    """The loss meter, which the engine's step updates directly after backward."""

    def __init__(self, device: torch.device, stopwatch: _Stopwatch) -> None:
        super().__init__(LossParts._fields, device, waited_seconds=lambda: 0.0)
        self._stopwatch = stopwatch

    def add(self, values: tuple[Tensor, ...]) -> None:
        super().add(values)
        self._stopwatch.lap("backward")


def _assert_finite(context: TrainContext) -> None:
    loss = statistics.fmean(context.meter.sums().values())
    weights = torch.stack([parameter.detach().abs().max() for parameter in context.state.model.parameters()])
    if not (math.isfinite(loss) and weights.isfinite().all()):
        raise WrongResultError(
            "Loss or weights are not finite after the measured steps. Nothing is reported."
        )
