"""This rank's micro-batches of an epoch, in the order that the seed gives, whatever is in them.

A loader of a task says how a batch is read, decoded, transformed and put together.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.image_decoder import Source, image_decoder
from horovod_volo.data.prefetcher import BatchPrefetcher, ImageThreadPool, PendingBatch
from horovod_volo.data.sampler import epoch_order, rank_indices

BATCHES_ANNOUNCED = 2

Pending = TypeVar("Pending", bound=PendingBatch)
Result = TypeVar("Result")


class OrderOfRank(NamedTuple):
    """What the order of a rank's samples depends on, besides the epoch."""

    seed: int
    rank: int
    size: int  # ranks
    accumulation: int


class OrderedBatches(ABC, Generic[Pending, Result]):
    """This rank's training batches, of any epoch, from any step on."""

    def __init__(
        self, images: Any, settings: Data, order: OrderOfRank, device: torch.device, threads: int
    ) -> None:
        """`images` are ImageFiles with a length; the first batch calls `_pipeline`."""
        self.waited_seconds = 0.0  # how long the caller has waited for batches
        seed, rank, size, accumulation = order
        global_batch = settings.global_batch or size * settings.batch_size * accumulation
        self.steps = len(images) // global_batch  # complete global batches
        self.bad_samples = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self._images, self._samples, self._settings, self._seed = images, len(images), settings, seed
        self._rank_indices = partial(
            rank_indices,
            rank=rank,
            size=size,
            global_batch=global_batch,
            accumulation=accumulation,
            micro_batch=settings.batch_size if settings.reproducible else 0,
        )
        self._device, self._decoder = device, image_decoder(settings.image_decoder)
        self._readers = ImageThreadPool(threads, "file-reader")
        self._transform_threads = ImageThreadPool(threads, "image-transform")
        self._prefetcher = BatchPrefetcher[Pending](
            partial(self._pipeline, batch=settings.batch_size, device=device, threads=threads),
            device,
            settings.prefetch,
            lambda index: self.bad_samples.add_undecodable(index, images.location(index)),
            self._transform,
            self._decoder.undecodable,
        )

    def batches(self, epoch: int, first_step: int) -> Iterator[Result]:
        """Yield the micro-batches of an epoch from `first_step` on, `accumulation` of them for each step."""
        with closing(self._prefetcher.batches(self._reads(epoch, first_step))) as decoded:
            began = perf_counter()
            for pending, images in decoded:
                batch = self._batch(pending, images)
                self.waited_seconds += perf_counter() - began
                yield batch
                began = perf_counter()

    def prepare_next(self) -> None:
        """Prepare the next batch of the iteration, if there is one, while the caller need not wait for it."""
        began = perf_counter()
        self._prefetcher.prepare_next()
        self.waited_seconds += perf_counter() - began

    def close(self) -> None:
        """End all threads; batches that were yielded stay valid."""
        self._prefetcher.close()
        self._readers.close()
        self._transform_threads.close()

    @abstractmethod
    def _pipeline(self, source: Source, **settings: Any) -> Any:
        """Build the pipeline that decodes."""

    @abstractmethod
    def _transform(self, pending: Pending, decoded: Any) -> Tensor:
        """Return the normalised images (batch, 3, side, side)."""

    @abstractmethod
    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> Pending:
        """Read the samples of a micro-batch, and draw their augmentation."""

    @abstractmethod
    def _batch(self, pending: Pending, images: Tensor) -> Result:
        """Return the micro-batch of decoded images."""

    def _order(self, epoch: int) -> NDArray[Any]:
        """Return the numbers of an epoch's draws, in their order."""
        block, window = self._settings.block_shuffle, self._settings.shuffle_window
        return epoch_order(self._seed, epoch, self._samples, block=block, window=window)

    def _reads(self, epoch: int, first_step: int) -> Iterator[Callable[[], Pending]]:
        order = self._order(epoch)
        steps = range(first_step, self.steps)
        batches = (indices for step in steps for indices in self._rank_indices(order, step))
        for indices in announced(batches, self._read_ahead):
            yield partial(self._read_batch, epoch, indices)

    def _read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Begin to read the samples of a micro-batch, where that saves time."""


def announced(
    batches: Iterator[NDArray[np.int64]], announce: Callable[[NDArray[np.int64]], object]
) -> Iterator[NDArray[np.int64]]:
    """Yield batches of samples, each announced BATCHES_ANNOUNCED before it is read."""
    waiting: deque[NDArray[np.int64]] = deque()
    for batch in batches:
        announce(batch)
        waiting.append(batch)
        if len(waiting) > BATCHES_ANNOUNCED:
            yield waiting.popleft()
    yield from waiting
