"""Pictures of training batches, for TensorBoard, at the start of some epochs.

What is drawn follows from the task, and only the logger that writes asks for it. Nothing is changed by it: a
run with pictures has the losses of one without.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.task import Batch


def is_due(context: TrainContext, every: int) -> bool:
    """Return whether an epoch begins for which something is shown that is shown every so many epochs."""
    epoch, step = context.derived.epoch_of(context.state.step)
    is_last = epoch == context.derived.epochs - 1
    return every > 0 and step == 0 and (epoch % every == 0 or is_last)


def with_pictures(context: TrainContext, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches; if it is time, log pictures of the first before."""
    if is_due(context, context.config.logging.images_every):
        first = next(batches)
        _log_pictures(context, first)
        yield first
        del first  # its memory is needed for the batches of the epoch
    yield from batches


def _log_pictures(context: TrainContext, batch: Batch) -> None:
    step = context.state.step
    draw = partial(context.learner.training_pictures, batch, step)
    context.logger.log_pictures(step, "training", draw)
