"""What the loaders of segmentation and detection share: this rank, its batches, how they are read."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import copy_async
from horovod_volo.data.image_decoder import Input, Normalization
from horovod_volo.data.ordered_batches import OrderedBatches, OrderOfRank
from horovod_volo.data.prefetcher import PendingBatch
from horovod_volo.models.precision import autocast
from horovod_volo.models.weights_header import statistics_of_run


class RankContext:
    """The settings of a run or of an evaluation, and how this rank's images reach the network."""

    def __init__(self, config: Config, world: World, resources: RankResources) -> None:
        self.config, self.world, self.device = config, world, resources.device
        self.threads = config.data.workers or resources.threads  # that read and transform images
        self.normalization = Normalization(*statistics_of_run(config.data, config.model.model))
        self.autocast = autocast(config.model.precision, resources.device)


@dataclass(frozen=True, eq=False)
class DenseBatch:
    """One micro-batch of images; the tensors are on the rank's device, the indices on the host."""

    images: Tensor  # (batch, 3, side, side) float32, normalised
    targets: tuple[Tensor, ...]  # masks, or boxes and classes: as `_collate` returns them
    indices: NDArray[np.int64]  # (batch,) positions in the list
    drawn: NDArray[np.int64]  # likewise, of the images that the epoch's order has here: damaged ones differ


@dataclass(frozen=True, eq=False)
class PendingDenseBatch(PendingBatch):
    """A batch that has been read, but whose images are not decoded."""

    targets: tuple[NDArray[Any], ...]
    plans: Sequence[Any]  # one for each image
    drawn: NDArray[np.int64]


class DenseBatches(OrderedBatches[PendingDenseBatch, DenseBatch]):
    """This rank's training batches, whose images are decoded by a pipeline and transformed by threads.

    Invariant: a batch is a pure function of (seed, epoch, step, rank, number of ranks), as for
    classification; the plan of an image is one of (seed, epoch, sample) and of its mask or boxes.
    """

    def __init__(self, images: Any, context: RankContext) -> None:
        self._config, world = context.config, context.world
        seed, accumulation = self._config.run.seed, self._config.update.accumulation
        order = OrderOfRank(seed, world.rank, world.size, accumulation)
        super().__init__(images, self._config.data, order, context.device, context.threads)
        self._side = self._config.model.img_size  # of the images in a batch
        self._mean, self._std = context.normalization.levels(context.device)

    @abstractmethod
    def _prepare(self, epoch: int, sample: int) -> tuple[int, NDArray[np.uint8], Any, Any]:
        """Read an image or its replacement, and draw its plan; return its number, content, plan and targets.

        A replacement is augmented as the damaged image would have been.
        """

    @abstractmethod
    def _inputs(self, plans: Sequence[Any]) -> tuple[Input, ...]:
        """Return what the pipeline needs to know of the images, besides their content."""

    @abstractmethod
    def _collate(self, targets: Sequence[Any]) -> tuple[NDArray[Any], ...]:
        """Return the targets of images as arrays (batch, ...)."""

    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> PendingDenseBatch:
        prepared = self._readers.map(partial(self._prepare, epoch), drawn.tolist())
        numbers, encoded, plans, targets = (list(column) for column in zip(*prepared, strict=True))
        inputs = (encoded, *self._inputs(plans))
        indices = np.array(numbers, dtype=np.int64)
        return PendingDenseBatch(indices, inputs, self._collate(targets), plans, drawn)

    def _batch(self, pending: PendingDenseBatch, images: Tensor) -> DenseBatch:
        targets = tuple(copy_async(each, self._device) for each in pending.targets)
        return DenseBatch(images, targets, pending.indices, pending.drawn)
