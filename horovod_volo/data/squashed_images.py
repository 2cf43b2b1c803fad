"""Whole images squashed to a square, as a teacher sees them who labels every part of an image.

They come through the trainer's evaluation graph. An image that cannot be read or decoded is left out and
named; a batch is never lost for one of its images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.data.bad_sample import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.pipeline import build_eval_pipeline, to_torch, undecodable

Encoded = NDArray[np.uint8]
BATCHES_READ_AHEAD = 3


@dataclass(eq=False)
class Load:
    """Some images on their way: their places in the catalog and their bytes."""

    indices: list[int]
    encoded: list[Encoded]


class SquashedImages:
    """Images of a catalog, decoded in batches in the order that is asked for."""

    def __init__(
        self, catalog: Catalog, *, side: int, batch: int, device: torch.device, threads: int
    ) -> None:
        self.problems: list[str] = []  # what was left out, in words
        self._catalog = catalog
        self._side, self._batch, self._device, self._threads = side, batch, device, threads
        self._readers = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="image-reader")
        self._to_read: Iterator[Sequence[int]] = iter(())
        self._reading: deque[tuple[Sequence[int], list[Future[Encoded]]]] = deque()
        self._again: deque[Load] = deque()  # read, but lost with a graph that met a damaged image
        self._decoding: deque[Load] = deque()
        self._pipeline = self._new_pipeline()

    def batches(self, indices: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the places and the pixels (images, 3, side, side), normalised, of what can be decoded."""
        self._to_read = iter(
            [indices[first : first + self._batch] for first in range(0, len(indices), self._batch)]
        )
        while True:
            try:
                # Bound to the stream of the teacher, the batch is waited for on the GPU, not on the host.
                (images,) = self._pipeline.run(self._stream())
            except StopIteration:
                self._pipeline.reset()
                return
            except RuntimeError:  # one image that cannot be decoded makes the whole graph invalid
                if not self._drop_undecodable():
                    raise
                self._pipeline = self._new_pipeline()
                continue
            yield self._decoding.popleft().indices, to_torch(images)

    def close(self) -> None:
        """End all threads."""
        self._readers.shutdown(cancel_futures=True)
        del self._pipeline

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _new_pipeline(self) -> Any:
        return build_eval_pipeline(
            self._next_inputs,
            image_size=self._side,
            batch=self._batch,
            device=self._device,
            threads=self._threads,
        )

    def _next_inputs(self) -> tuple[list[NDArray[Any]], ...]:
        load = self._again.popleft() if self._again else self._next_load()
        self._decoding.append(load)
        size = np.full(2, self._side, np.float32)
        corner = np.zeros(2, np.int32)
        images = len(load.indices)
        return load.encoded, [size] * images, [corner] * images

    def _next_load(self) -> Load:
        while True:
            self._read_ahead()
            if not self._reading:
                raise StopIteration
            load = Load([], [])
            for index, reading in zip(*self._reading.popleft(), strict=True):
                try:
                    load.encoded.append(reading.result())
                    load.indices.append(index)
                except BadSampleError as problem:
                    self.problems.append(str(problem))
            if load.indices:
                return load

    def _read_ahead(self) -> None:
        while len(self._reading) < BATCHES_READ_AHEAD:
            indices = next(self._to_read, None)
            if indices is None:
                return
            futures = [self._readers.submit(self._catalog.read, index) for index in indices]
            self._reading.append((indices, futures))

    def _drop_undecodable(self) -> bool:
        """Take what DALI refuses out of the batches being decoded, keep the rest; say if there was any."""
        lost, self._decoding = self._decoding, deque()
        kept, dropped = [], 0
        for load in lost:
            for place in reversed(undecodable(load.encoded)):
                index = load.indices.pop(place)
                load.encoded.pop(place)
                self.problems.append(f"{self._catalog.location(index)} cannot be decoded")
                dropped += 1
            if load.indices:
                kept.append(load)
        self._again.extendleft(reversed(kept))  # before those that wait since an earlier loss
        return dropped > 0
