"""One training step: forward, loss and backward of each micro-batch, exchange, clip, update.

Backward fills flat buckets of gradients, and a full bucket leaves at once to be averaged over the ranks;
`synchronized_gradients` waits for the last ones. Before that the loader prepares the next batch: its host
work, and on a GPU its kernels, overlap with the exchange.
Invariant: gradients are unscaled and clipped after they have been averaged. If fp16 overflowed on any rank,
the averages show it on every rank, and all ranks skip the step; so do they if a loss or a gradient of any
rank is not finite. What they agreed on is among the `outcomes` of `state.reducer.statistics`; with several
GPUs one step later, so that the host does not wait for them.
"""

from collections.abc import Iterator

from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step_record import StepRecord
from horovod_volo.engine.task import Batch
from horovod_volo.optim.build import set_lr
from horovod_volo.optim.clip import divide


def train_step(run: TrainContext, batches: Iterator[Batch]) -> None:
    """Take one optimizer step on the next micro-batches. Collective: every rank calls this."""
    state, learner, timer, record = run.state, run.learner, run.progress.timer, StepRecord(run)
    timer.begin()
    set_lr(state.optimizer, run.lr(state.step))
    for number in run.micro_batches:
        batch = next(batches)
        outputs = learner.forward(batch, state.step, number)
        losses = learner.loss(outputs, batch)
        del outputs  # backward frees their memory
        # Micro-batches count by their images, which differ where ranks do not divide the global batch.
        loss = losses.total / (run.derived.images_per_part / len(batch.indices))
        state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        record.add(batch, losses)
    record.end_backward()
    learner.train_loader.prepare_next()
    timer.end()  # from here on this rank waits for others
    with state.reducer.synchronized_gradients():  # inside, each `grad` is the average over ranks
        timer.exchanged()
        if state.reducer.statistics.finite or state.scaler.is_enabled():  # the scaler skips the step itself
            state.scaler.unscale_(state.optimizer)
            record.note_gradients()
            divide(state.optimizer, run.clip())
            state.scaler.step(state.optimizer)
    state.scaler.update()
    state.average.update(state.step)
    state.step += 1
    run.heartbeat.beat(state.step)
