"""One training step: forward and backward over the micro-batches, allreduce, clip, optimizer, EMA.

Invariant: gradients are unscaled and clipped after the allreduce. They are then the same on all ranks, so
that all ranks skip the step if fp16 overflowed on any of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.rng import Purpose, random_bits
from horovod_volo.engine.context import TrainContext
from horovod_volo.optim.build import set_lr
from horovod_volo.optim.clip import divide


def train_step(context: TrainContext, batches: Iterator[TrainBatch]) -> None:
    """Make one optimizer step from the next micro-batches. Collective: every rank calls this."""
    state, accumulation = context.state, context.config.update.accumulation
    seed = context.config.run.seed
    set_lr(state.optimizer, context.lr(state.step))
    for number in range(accumulation):
        batch = next(batches)
        mix = context.mix(state.step, number)
        drop_path_seed = random_bits(Purpose.DROP_PATH, seed, state.step, context.world.rank, number)
        with context.autocast:
            class_logits, token_logits = context.forward(
                mix.images(batch.images), mix.swap_tokens, drop_path_seed
            )
        parts = context.loss(class_logits, token_logits, batch.labels, mix)
        state.scaler.scale(parts.total / accumulation).backward()  # type: ignore[no-untyped-call]
        context.meter.add(parts)
    with state.reducer.synchronized_gradients():
        state.scaler.unscale_(state.optimizer)
        divide(state.optimizer, context.clip())
        state.scaler.step(state.optimizer)
    state.scaler.update()
    state.average.update(state.step)
    state.step += 1
