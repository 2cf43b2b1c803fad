"""How batches reach the trainer: read by one thread, decoded by DALI, handed over in order.

One reading thread prepares whole batches ahead of DALI, and DALI decodes ahead of the consumer.
DALI returns batches in the order it was fed, so the oldest load still in `_decoding` belongs to
the next images: whatever feeds DALI must append there exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.data.augmentation.crop_flip import CropFlip
from horovod_volo.data.augmentation.rand_augment import Operations
from horovod_volo.data.augmentation.random_erasing import Erasures
from horovod_volo.data.augmentation.whole_image import Parts
from horovod_volo.data.pipeline import Source, to_torch, undecodable


class Labels(NamedTuple):
    """The label maps of a batch, flipped like the images, and where the images were cut."""

    scores: NDArray[np.float16]  # (batch, k, height, width)
    ids: NDArray[np.integer[Any]]  # (batch, k, height, width)
    boxes: NDArray[np.float32]  # (batch, 4) as fractions of the maps


class AugmentParams(NamedTuple):
    """What happens to the images of a batch after decoding."""

    plan: CropFlip
    operations: Operations
    erasures: Erasures
    parts: Parts | None = None  # None: the operations act on the crops; else on the whole images


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """One batch on its way: what DALI is fed, and what travels beside it."""

    indices: NDArray[np.int64]  # (batch,) places in the catalog of what is shown
    again: Callable[[], PendingBatch]  # makes the load anew
    inputs: tuple[list[NDArray[Any]], ...]  # the graph's inputs; the encoded bytes come first
    labels: Labels | None = None  # None: there are no label maps
    treatment: AugmentParams | None = None  # None: the graph's output is the finished batch
    absent: NDArray[np.bool_] | None = None  # (batch,) images that nothing could be shown for

    @property
    def present(self) -> NDArray[np.int64]:
        """Return the places in the batch of the images that are shown."""
        return np.flatnonzero(np.ones(len(self.indices)) if self.absent is None else ~self.absent)


Finish = Callable[[PendingBatch, Any], torch.Tensor]  # makes the batch out of what DALI decoded


class BatchPrefetcher:
    """Carries loads through one DALI pipeline, one run of batches after the other."""

    def __init__(
        self,
        build_pipeline: Callable[[Source], Any],
        device: torch.device,
        reads_ahead: int,
        tell: Callable[[int], object],
        finish: Finish = lambda load, decoded: to_torch(decoded),  # noqa: ARG005
    ) -> None:
        self._tell = tell  # of the place of an image that cannot be decoded
        self._build_pipeline = build_pipeline
        self._finish = finish
        self._device = device
        self._reads_ahead = reads_ahead
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-reader")
        self._to_read: Iterator[Callable[[], PendingBatch]] = iter(())
        self._reading: deque[Future[PendingBatch]] = deque()
        self._decoding: deque[PendingBatch] = deque()
        self._run: object = None  # what marks the current run; a run that another ended must not go on
        self._pipeline: Any = build_pipeline(self._next_inputs)

    def carry(
        self, loads: Iterable[Callable[[], PendingBatch]]
    ) -> Generator[tuple[PendingBatch, torch.Tensor]]:
        """Yield each load with its images (batch, 3, side, side), ending any earlier run."""
        self.stop()
        self._run = run = object()
        self._to_read = iter(loads)
        try:
            while True:
                decoded = self._decoded()
                if decoded is None:
                    return
                load = self._decoding.popleft()
                yield load, self._finish(load, decoded)
                if self._run is not run:
                    raise RuntimeError("these batches ended when a later run began or the stream was closed")
        finally:
            if self._run is run:
                self.stop()

    def stop(self) -> None:
        """End the current run; batches already on their way are dropped."""
        self._run = None
        self._to_read = iter(())
        for future in self._reading:
            future.cancel()
        self._reading.clear()
        try:
            while True:
                self._pipeline.run()
        except StopIteration:
            self._pipeline.reset()
        except RuntimeError:  # one file that DALI cannot decode makes the whole pipeline invalid
            self._pipeline = self._build_pipeline(self._next_inputs)
        self._decoding.clear()

    def close(self) -> None:
        """End the current run and all threads; nothing can be carried afterwards."""
        if self._pipeline is None:
            return
        self.stop()
        self._reader.shutdown(cancel_futures=True)
        self._pipeline = None  # the last reference: DALI's threads end with it

    def _decoded(self) -> Any | None:
        on_gpu = self._device.type == "cuda"
        while True:
            try:
                # On the stream of the training step, the batch is waited for on the GPU, not on the host.
                (images,) = self._pipeline.run(torch.cuda.current_stream(self._device) if on_gpu else None)
            except StopIteration:
                return None
            except RuntimeError as error:
                self._begin_again_without_the_damaged(error)
            else:
                return images

    def _begin_again_without_the_damaged(self, cause: RuntimeError) -> None:
        """Find what DALI could not decode, and have the batches on their way made again without it."""
        found = False
        for load in self._decoding:
            for place in undecodable(load.inputs[0]):
                self._tell(int(load.indices[place]))
                found = True
        if not found:
            raise cause
        again = [self._reader.submit(load.again) for load in self._decoding]
        self._decoding.clear()
        self._reading.extendleft(reversed(again))
        self._pipeline = self._build_pipeline(self._next_inputs)

    def _next_inputs(self) -> tuple[list[NDArray[Any]], ...]:
        self._read_ahead()
        if not self._reading:
            raise StopIteration
        load = self._reading.popleft().result()
        self._read_ahead()
        self._decoding.append(load)
        return load.inputs

    def _read_ahead(self) -> None:
        while len(self._reading) < self._reads_ahead:
            read = next(self._to_read, None)
            if read is None:
                return
            self._reading.append(self._reader.submit(read))
