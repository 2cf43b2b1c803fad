"""Images as a teacher sees them who labels every part: squashed to a square whole, or a centre crop of them.

They are read and decoded as the trainer's evaluation images. One that cannot be is left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.center_crop import crop_corners, resized_to
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.data.pipeline import build_eval_pipeline
from horovod_volo.data.prefetcher import BatchPrefetcher, PendingBatch
from horovod_volo.data.reading import read_present
from horovod_volo.data.thread_pool import ImageThreadPool

BATCHES_READ_AHEAD = 3


class TeacherImages:
    """Images of a catalog, decoded in batches in the order that is asked for.

    `geometry` is the part of each image that is shown; a centre crop's resized side is rounded to pixels.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        side: int,
        batch: int,
        device: torch.device,
        threads: int,
        geometry: MapGeometry = WHOLE,
    ) -> None:
        self.problems: list[str] = []  # what was left out, in words
        self._catalog = catalog
        self._side, self._batch, self._geometry = side, batch, geometry
        self._damage = BadSampleTracker("skip", limit=len(catalog))
        self._readers = ImageThreadPool(threads, "image-reader")
        self._conveyor = BatchPrefetcher(
            partial(build_eval_pipeline, image_size=side, batch=batch, device=device, threads=threads),
            device,
            BATCHES_READ_AHEAD,
            lambda index: self._damage.cannot_decode(index, catalog.location(index)),
        )

    def batches(self, indices: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the places and the pixels (images, 3, side, side), normalised, of what can be decoded."""
        with closing(self._conveyor.carry(self._loads(np.array(indices, dtype=np.int64)))) as carried:
            for load, pixels in carried:
                present = load.present
                if len(present) == len(pixels):
                    yield load.indices.tolist(), pixels
                elif len(present):
                    yield load.indices[present].tolist(), pixels[torch.from_numpy(present).to(pixels.device)]
        self.problems += self._damage.untold()

    def close(self) -> None:
        """End all threads."""
        self._conveyor.close()
        self._readers.close()

    def _loads(self, indices: NDArray[np.int64]) -> Iterator[Callable[[], PendingBatch]]:
        for first in range(0, len(indices), self._batch):
            yield partial(self._load, indices[first : first + self._batch])

    def _load(self, indices: NDArray[np.int64]) -> PendingBatch:
        encoded, sizes, absent = read_present(indices, self._catalog, self._damage, self._readers)
        resized = self._resized(sizes)
        corners = crop_corners(resized, self._side)
        inputs = (encoded, list(resized.astype(np.float32)), list(corners.astype(np.int32)))
        return PendingBatch(indices, partial(self._load, indices), inputs, absent=absent)

    def _resized(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the heights and widths, (batch, 2), of images from whose middle the square is cut."""
        geometry = self._geometry
        if geometry == WHOLE:
            return np.full_like(sizes, self._side)
        return resized_to(sizes, max(1, round(self._side * geometry.resize / geometry.size)))
