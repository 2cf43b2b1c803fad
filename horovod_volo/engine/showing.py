"""Pictures of training batches and histograms of blocks, for TensorBoard, at the start of some epochs.

What is drawn follows from the task, and only the logger that writes asks for it. Nothing is changed by it: a
run with pictures has the losses of one without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.model_cost import block_of
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
    draw = partial(context.parts.training_pictures, batch, step)
    context.logger.log_pictures(step, "training", draw)


def log_histograms(context: TrainContext) -> None:
    """Log weights and gradients of each block, before the update; of a sharded optimizer, those of rank 0."""
    context.wants_histograms = False
    parameters = context.state.reducer.local_parameters

    def weights() -> dict[str, list[Tensor]]:
        return _by_block({name: parameter.detach() for name, parameter in parameters.items()})

    def gradients() -> dict[str, list[Tensor]]:
        return _by_block({name: each.grad for name, each in parameters.items() if each.grad is not None})

    with torch.no_grad():
        context.logger.log_histograms(context.state.step, "weights", weights)
        context.logger.log_histograms(context.state.step, "gradients", gradients)


def _by_block(tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        found[block_of(name)].append(tensor)
    return found
