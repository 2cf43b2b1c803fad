"""One training step. Given the run and an iterator over micro-batches on the device, it runs forward and
backward of each, averages the gradients over ranks and clips them. It leaves updated weights, optimizer state
and averaged weights (EMA), and `state.step` one higher.

Hooks of the reducer launch the all-reduces while backward runs; `synchronized_gradients` waits for them.
Before that the loader prepares the next batch: its host work, and on a GPU its kernels, overlap with the
all-reduce of the last buckets.
Invariant: gradients are unscaled and clipped after they have been averaged. If fp16 overflowed on any rank,
the averages show it on every rank, and all ranks skip the step; so do they if a loss or a gradient of any
rank is not finite. What they agreed on is among the `outcomes` of `state.reducer.statistics`; with several
GPUs one step later, so that the host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import OwnStep, checksums
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.showing import log_histograms
from horovod_volo.engine.task import Batch
from horovod_volo.optim.build import set_lr
from horovod_volo.optim.clip import divide

_NO_SAMPLES: NDArray[np.int64] = np.empty(0, dtype=np.int64)


def train_step(context: TrainContext, batches: Iterator[Batch]) -> None:
    """Take one optimizer step on the next micro-batches. Collective: every rank calls this."""
    state, accumulation = context.state, context.config.update.accumulation
    statistics = state.reducer.statistics
    samples, drawn = list[int](), [_NO_SAMPLES]
    context.timer.begin()
    set_lr(state.optimizer, context.lr(state.step))
    for number in range(accumulation):
        batch = next(batches)
        losses = context.parts.losses(batch, state.step, number)
        # Micro-batches count by their images, which differ where ranks do not divide the global batch.
        loss = losses.total / (context.derived.images_per_rank / len(batch.indices))
        state.scaler.scale(loss).backward()
        statistics.add_loss(losses.total)
        context.meter.add(losses)
        samples += batch.indices.tolist()
        drawn.append(batch.drawn)
    epoch, _ = context.derived.epoch_of(state.step)
    first, second = checksums(context.config.run.seed, epoch, np.concatenate(drawn))
    statistics.note_step(OwnStep(state.step + 1, samples, (int(first), int(second))))
    if context.stop.received:
        statistics.ask_to_stop()
    context.parts.train_loader.prepare_next()  # while the last buckets are reduced
    context.timer.end()
    with state.reducer.synchronized_gradients():  # inside, each `grad` is the average over ranks
        context.timer.exchanged()
        if statistics.finite or state.scaler.is_enabled():  # the scaler skips the step itself
            state.scaler.unscale_(state.optimizer)
            if context.wants_histograms:
                log_histograms(context)
            if (state.step + 1) % context.config.run.log_every == 0:
                context.logged_norm = context.gradient_norm()
            divide(state.optimizer, context.clip())
            if statistics.found_inf is not None and not state.scaler.is_enabled():
                state.optimizer.found_inf = statistics.found_inf  # type: ignore[attr-defined]
            state.scaler.step(state.optimizer)
    state.scaler.update()
    state.average.update(state.step)
    state.step += 1
    context.heartbeat.beat(state.step)
