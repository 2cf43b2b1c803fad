"""What is noted of a step besides its arithmetic: losses, samples, histograms, pictures.

Nothing is changed by it, and it does not wait for the device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.step_statistics import OwnStep, checksums
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.task import Batch, Losses

_THROUGH_LAST_NUMBER = re.compile(r"(.*?\.)?\d+(?=\.)(?!.*\.\d+\.)")


class StepRecord:
    """Notes one step of this rank."""

    def __init__(self, run: TrainContext) -> None:
        self._run = run
        self._samples, self._in_order = list[int](), list[NDArray[np.int64]]()
        self._statistics = run.state.reducer.statistics

    def add(self, batch: Batch, losses: Losses) -> None:
        """Note a micro-batch."""
        self._statistics.add_loss(losses.total)
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
        """Note the norm of the averaged gradients, and histograms, if this step shows them. Collective."""
        run = self._run
        if run.progress.wants_histograms:
            log_histograms(run)
        if (run.step + 1) % run.config.run.log_every == 0:
            run.progress.logged_norm = run.gradient_norm()


def log_histograms(run: TrainContext) -> None:
    """Log weights and gradients of each block, before the update; of a sharded optimizer, those of rank 0."""
    run.progress.wants_histograms = False
    parameters = run.state.reducer.local_parameters.items()
    weights = [(name, parameter.detach()) for name, parameter in parameters]
    gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
    run.logger.log_histograms(run.step, "weights", partial(_by_block, weights))
    run.logger.log_histograms(run.step, "gradients", partial(_by_block, gradients))


def _by_block(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors:
        found[block_of(name)].append(tensor)
    return found


def block_of(parameter: str) -> str:
    """Return the block of a parameter, by its name up to the last number, or else its first part."""
    found = _THROUGH_LAST_NUMBER.match(parameter)
    return found[0] if found else parameter.partition(".")[0]


def is_due(context: TrainContext, every: int) -> bool:
    """Return whether an epoch begins for which something is shown that is shown every so many epochs."""
    epoch, step = context.derived.epoch_of(context.state.step)
    is_last = epoch == context.derived.epochs - 1
    return every > 0 and step == 0 and (epoch % every == 0 or is_last)


def with_pictures(context: TrainContext, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches; if it is time, log pictures of the first before."""
    if is_due(context, context.config.logging.images_every):
        first = next(batches)
        step = context.state.step
        draw = partial(context.learner.training_pictures, first, step)
        context.logger.log_pictures(step, "training", draw)
        yield first
        del first, draw  # its memory is needed for the batches of the epoch
    yield from batches
