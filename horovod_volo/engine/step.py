"""One training step. Given the run and an iterator over micro-batches on the device, it runs forward and
backward of each, averages the gradients over ranks and clips them. It leaves updated weights, optimizer state
and averaged weights (EMA), and `state.step` one higher.

Hooks of the reducer launch the all-reduces while backward runs; `synchronized_gradients` waits for them.
Before that the loader prepares the next batch: its host work, and on a GPU its kernels, overlap with the
all-reduce of the last buckets.
Invariant: gradients are unscaled and clipped after they have been averaged. If fp16 overflowed on any rank,
the averages show it on every rank, and all ranks skip the step; so do they if any rank's loss is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.rng import Purpose, random_bits
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.ledger import checksums
from horovod_volo.optim.build import set_lr
from horovod_volo.optim.clip import divide

_NO_SAMPLES: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def train_step(context: TrainContext, batches: Iterator[TrainBatch]) -> list[int]:
    """Take one optimizer step on the next micro-batches; return their samples. Collective.

    `state.reducer.statistics.finite` tells whether it was skipped because a loss is not finite.
    """
    state, accumulation = context.state, context.config.update.accumulation
    seed, samples, drawn = context.config.run.seed, list[int](), [_NO_SAMPLES]
    context.timer.begin()
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
        # Micro-batches count by their images, which differ where ranks do not divide the global batch.
        loss = parts.total / (context.derived.images_per_rank / len(batch.indices))
        state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        state.reducer.statistics.add_loss(parts.total)
        context.meter.add(parts)
        samples += batch.indices.tolist()
        drawn.append(batch.drawn)
    epoch, _ = context.derived.epoch_of(state.step)
    first, second = checksums(seed, epoch, np.concatenate(drawn))
    state.reducer.statistics.note_samples((int(first), int(second)))
    if context.stop.received:
        state.reducer.statistics.ask_to_stop()
    if context.hosts_changed():
        state.reducer.statistics.note_changed_hosts()
    context.train_loader.prepare_next()  # while the last buckets are reduced
    context.timer.end()
    with state.reducer.synchronized_gradients():  # inside, each `grad` is the average over ranks
        if state.reducer.statistics.finite or state.scaler.is_enabled():  # the scaler skips the step itself
            state.scaler.unscale_(state.optimizer)
            if (state.step + 1) % context.config.run.log_every == 0:
                context.logged_norm = context.gradient_norm()
            divide(state.optimizer, context.clip())
            state.scaler.step(state.optimizer)
    state.scaler.update()
    state.average.update(state.step)
    state.step += 1
    context.ledger.note(state.step, state.reducer.statistics.checksums)
    context.heartbeat.beat(state.step)
    return samples
