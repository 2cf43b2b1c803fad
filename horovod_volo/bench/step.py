"""The speed of the engine's own training step on random images, and where its time goes.

The whole steps run untouched. The split runs apart, for it waits for the device at every mark, and
so takes a little longer than the whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor

from horovod_volo.bench.agreement import WrongResultError
from horovod_volo.bench.pairs import repeats_for, timed, wait_for
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import checked_config, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.core.labels import Labels
from horovod_volo.data.loader import TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from horovod_volo.monitor.meters import LossMeter
from horovod_volo.objective.loss import LossParts
from horovod_volo.objective.mixtoken import Mix

CLASSES = 1000
_SPLIT_STEPS = 9
_MILLISECONDS = 1e3


def measure(*, model: str, img_size: int, batch_size: int, precision: str, pairs: int) -> Result:
    """Measure a model's step on all ranks. Collective: every rank calls this."""
    config = checked_config(
        {
            "model": model,
            "img_size": img_size,
            "batch_size": batch_size,
            "precision": precision,
            "token_label": True,
            "token_label_data": "random",
        }
    )
    world = World.connect()
    context = synthetic_job(config, world, CLASSES)
    try:
        batch = random_batch(config, CLASSES, context.resources.device, seed=world.rank)
        seconds = _whole_steps(context, batch, pairs)
        split = _split_steps(context, itertools.repeat(batch))
        _assert_finite(context)
    finally:
        context.close()
    images = batch_size * world.size
    title = f"training step, {img_size} px, {precision}, {world.size} x {batch_size} random images"
    figures = [
        Figure.of("images a second", [images / taken for taken in seconds], "images/s"),
        Figure.of("whole step", [_MILLISECONDS * taken for taken in seconds], "ms"),
        *(Figure.of(name, [_MILLISECONDS * taken for taken in split[name]], "ms") for name in split),
    ]
    return Result(f"step {model}", title, figures)


def _whole_steps(context: TrainContext, batch: TrainBatch, blocks: int) -> list[float]:
    """Return the seconds of a step, block by block."""
    action = step_of(context, batch)
    # Every rank takes part in every step, so rank 0 says how many a block has.
    repeats = context.world.broadcast_object(repeats_for(action, context.resources.device))
    block = timed(action, repeats, context.resources.device)
    return [block() for _ in range(blocks)]


def _split_steps(context: TrainContext, passes: Iterator[TrainBatch]) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, step by step."""
    marks = _Marks(context.resources.device)

    def loss(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Mix) -> LossParts:
        parts = context.loss(class_logits, token_logits, labels, box)
        marks.reached("forward and loss")
        return parts

    # The engine's step calls these at the end of its parts; in fp16 the unscaling counts as exchange.
    marked = dataclasses.replace(
        context,
        loss=loss,
        window=_MarkedWindow(context.resources.device, marks),
        clip=lambda: marks.reached("exchange wait"),
    )
    for _ in range(_SPLIT_STEPS):
        marks.begin()
        train_step(marked, passes)
        marks.reached("update")
    return marks.seconds


class _Marks:
    """Seconds from one mark to the next."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._device = device

    def begin(self) -> None:
        wait_for(self._device)
        self._last = perf_counter()

    def reached(self, name: str) -> None:
        before = self._last
        self.begin()
        self.seconds.setdefault(name, []).append(self._last - before)


class _MarkedWindow(LossMeter):
    """The meters, which the engine's step reaches right after backward."""

    def __init__(self, device: torch.device, marks: _Marks) -> None:
        super().__init__(LossParts._fields, device, waited_seconds=lambda: 0.0)
        self._marks = marks

    def add(self, values: tuple[Tensor, ...]) -> None:
        super().add(values)
        self._marks.reached("backward")


def _assert_finite(context: TrainContext) -> None:
    loss = statistics.fmean(context.window.sums().values())
    weights = torch.stack([parameter.detach().abs().max() for parameter in context.state.model.parameters()])
    if not (math.isfinite(loss) and weights.isfinite().all()):
        raise WrongResultError("The measured steps ended in values that are not finite. Nothing is told.")
