"""One training step: forward and backward over the micro-batches, allreduce, clip, optimizer, EMA.

Invariant: gradients are unscaled and clipped after the allreduce. They are then the same on all ranks, so
that all ranks skip the step if fp16 overflowed on any of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from horovod_volo.data.loader import Batch
from horovod_volo.engine.context import TrainContext
from horovod_volo.objective.draws import bits
from horovod_volo.objective.loss import Labels
from horovod_volo.optim.clip import divide
from horovod_volo.optim.groups import set_lr

_STREAM = 0x64_72_6F_70  # keeps stochastic depth apart from every other use of the seed


def train_step(context: TrainContext, batches: Iterator[Batch]) -> None:
    """Make one optimizer step from the next micro-batches. Collective: every rank calls this."""
    state, accumulation = context.state, context.config.update.accumulation
    set_lr(state.optimizer, context.lr(state.step))
    for number in range(accumulation):
        batch = next(batches)
        labels = Labels(batch.classes, batch.scores, batch.ids, batch.boxes, batch.reach)
        mix = context.mix(state.step, number)
        seed_pass(context.resources.device, context.config.run.seed, state.step, context.world.rank, number)
        with context.autocast:
            class_logits, token_logits = context.forward(mix.images(batch.images), mix.swap_tokens)
        parts = context.loss(class_logits, token_logits, labels, mix)
        state.scaler.scale(parts.total / accumulation).backward()  # type: ignore[no-untyped-call]
        context.meter.add(parts)
    with state.reducer.synchronized_gradients():
        state.scaler.unscale_(state.optimizer)
        divide(state.optimizer, context.clip())
        state.scaler.step(state.optimizer)
    state.scaler.update()
    state.average.update(state.step)
    state.step += 1


def seed_pass(device: torch.device, seed: int, step: int, rank: int, number: int) -> None:
    """Make what torch draws in a pass (stochastic depth) a function of where the pass stands."""
    drawn = bits(_STREAM, seed, step, rank, number) >> 1  # torch takes 63
    # torch.manual_seed() would do, but it writes down the whole call stack for devices that are not there,
    # which costs more than all else that a step does in Python.
    torch.default_generator.manual_seed(drawn)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(drawn)
