"""What is noted of a step besides its arithmetic: losses, samples, pictures.

Nothing is changed by it, and it does not wait for the device.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import OwnStep, checksums
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.task import Batch, Losses


class StepRecord:
    """Notes one step of this rank."""

    def __init__(self, run: TrainContext) -> None:
        self._run = run
        self._samples, self._in_order = list[int](), list[NDArray[np.int64]]()
        self._statistics = run.state.reducer.statistics

    def add(self, batch: Batch, losses: Losses) -> None:
        """Note a micro-batch."""
        self._statistics.add_micro_batch(losses.total)
        self._run.progress.meter.add(losses)
        self._samples += batch.indices.tolist()
        self._in_order.append(batch.drawn)

    def end_backward(self) -> None:
        """Move the samples of the step, and a request to stop, into its exchange."""
        run = self._run
        epoch, _ = run.derived.epoch_of(run.step)
        first, second = checksums(run.config.run.seed, epoch, np.concatenate(self._in_order))
        self._statistics.note_step(OwnStep(run.step + 1, self._samples, (int(first), int(second))))
        if run.stop.received:
            self._statistics.ask_to_stop()

    def note_gradients(self) -> None:
        """Note the norm of the averaged gradients, if this step is followed by a log point. Collective."""
        run = self._run
        if (run.step + 1) % run.config.run.log_every == 0:
            run.progress.logged_norm = run.gradient_norm()


def with_pictures(context: TrainContext, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches of an epoch; before the first, if it is time, log pictures of it."""
    every, step = context.config.logging.images_every, context.state.step
    epoch, steps_over = context.derived.epoch_of(step)
    if every and not steps_over and (epoch % every == 0 or epoch == context.derived.epochs - 1):
        first = next(batches)
        draw = partial(context.learner.training_pictures, first, step)
        context.logger.log_pictures(step, "training", draw)
        yield first
        del first, draw  # its memory is needed for the batches of the epoch
    yield from batches
