"""Speed of the engine's training step on random images, and the time of its parts.

Whole steps run unchanged. The parts are timed in a separate run, which waits for the device at the end of
each part and therefore takes slightly longer in total.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from time import perf_counter

import torch
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, ImgSize, Model, Pairs, Precision
from horovod_volo.bench.comparison import WrongResultError, repeats_for, timed, wait_for
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import RANDOM_LABELS, checked_config, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.data.stream import Batch
from horovod_volo.engine.job import Job
from horovod_volo.engine.step import train_step
from horovod_volo.monitor.window import Window
from horovod_volo.objective.loss import Labels, LossParts
from horovod_volo.objective.mixtoken import Mix

CLASSES = 1000
_SPLIT_STEPS = 9


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    pairs: Pairs = 7,
) -> Result:
    """Measure a model's step. Collective: every rank calls this."""
    settings = {"model": model, "img_size": img_size, "batch_size": batch_size, "precision": precision}
    config = checked_config(settings | RANDOM_LABELS)
    world = World.join()
    job = synthetic_job(config, world, CLASSES)
    try:
        batch = random_batch(config, CLASSES, job.share.device, seed=world.rank)
        seconds = _whole_steps(job, batch, pairs)
        parts = _parts_of_steps(job, batch)
        _assert_finite(job)
    finally:
        job.close()
    title = f"training step, {img_size} px, {precision}, {world.size} x {batch_size} random images"
    figures = [
        Figure.of_rate("images a second", seconds, batch_size * world.size),
        Figure.of_seconds("whole step", seconds),
        *(Figure.of_seconds(name, parts[name]) for name in parts),
    ]
    return Result(f"step {model}", title, figures)


def _whole_steps(job: Job, batch: Batch, blocks: int) -> list[float]:
    """Return the seconds of a step in each block."""
    action = step_of(job, batch)
    # A step is a collective, so all ranks take the number of repeats from rank 0.
    repeats = job.world.share(repeats_for(action, job.share.device))
    block = timed(action, repeats, job.share.device)
    return [block() for _ in range(blocks)]


def _parts_of_steps(job: Job, batch: Batch) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, step by step."""
    stopwatch = _Stopwatch(job.share.device)

    def loss(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Mix) -> LossParts:
        parts = job.loss(class_logits, token_logits, labels, box)
        stopwatch.lap("forward and loss")
        return parts

    # The engine's step calls these at the end of its parts; in fp16 unscaling counts as exchange.
    marked = dataclasses.replace(
        job,
        loss=loss,
        window=_MarkedWindow(job.share.device, stopwatch),
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


class _MarkedWindow(Window):
    """The meters, which the engine's step updates directly after backward."""

    def __init__(self, device: torch.device, stopwatch: _Stopwatch) -> None:
        super().__init__(LossParts._fields, device, waited_seconds=lambda: 0.0)
        self._stopwatch = stopwatch

    def add(self, values: tuple[Tensor, ...]) -> None:
        super().add(values)
        self._stopwatch.lap("backward")


def _assert_finite(job: Job) -> None:
    loss = statistics.fmean(job.window.sums().values())
    weights = torch.stack([parameter.detach().abs().max() for parameter in job.state.model.parameters()])
    if not (math.isfinite(loss) and weights.isfinite().all()):
        raise WrongResultError(
            "Loss or weights are not finite after the measured steps. Nothing is reported."
        )
