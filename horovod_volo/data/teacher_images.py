"""Images for a teacher that predicts a label map: whole images resized to a square, or their centre crops.

They are read and decoded as evaluation images are. Damaged ones are left out and reported in `problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.center_crop import resized_to
from horovod_volo.data.image_decoder import image_decoder
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.data.prefetcher import BatchPrefetcher
from horovod_volo.data.reading import PendingEvalBatch, read_eval_batch
from horovod_volo.data.thread_pool import ImageThreadPool

BATCHES_READ_AHEAD = 3


class TeacherImages:
    """Batches of given images of a catalog.

    `geometry` is the part of each image that is shown; the size before a centre crop is rounded to pixels.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        image_size: int,
        batch: int,
        device: torch.device,
        threads: int,
        geometry: MapGeometry = WHOLE,
    ) -> None:
        self.problems: list[str] = []  # one message for each image that was left out
        self._image_size, self._batch_size, self._geometry = image_size, batch, geometry
        self._bad_samples = BadSampleTracker("skip", limit=len(catalog))
        self._readers = ImageThreadPool(threads, "image-reader")
        self._read_batch = partial(
            read_eval_batch,
            files=catalog,
            bad_samples=self._bad_samples,
            readers=self._readers,
            resize=self._resized_shapes,
            image_size=image_size,
        )
        decoder = image_decoder()
        build = decoder.build_eval_pipeline
        self._prefetcher = BatchPrefetcher[PendingEvalBatch](
            partial(build, image_size=image_size, batch=batch, device=device, threads=threads),
            device,
            BATCHES_READ_AHEAD,
            lambda index: self._bad_samples.add_undecodable(index, catalog.location(index)),
            undecodable=decoder.undecodable,
        )

    def batches(self, indices: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield indices and normalised images (batch, 3, image_size, image_size) of what can be decoded."""
        with closing(self._prefetcher.batches(self._reads(np.array(indices, dtype=np.int64)))) as decoded:
            for pending, images in decoded:
                usable = np.flatnonzero(~pending.bad)
                if len(usable) == len(images):
                    yield pending.indices.tolist(), images
                elif len(usable):
                    yield pending.indices[usable].tolist(), images[torch.from_numpy(usable).to(images.device)]
        self.problems += self._bad_samples.new_messages()

    def close(self) -> None:
        """End all threads."""
        self._prefetcher.close()
        self._readers.close()

    def _reads(self, indices: NDArray[np.int64]) -> Iterator[Callable[[], PendingEvalBatch]]:
        for first in range(0, len(indices), self._batch_size):
            yield partial(self._read_batch, indices[first : first + self._batch_size])

    def _resized_shapes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the heights and widths, (batch, 2), before the centre crop."""
        if self._geometry == WHOLE:
            return np.full_like(sizes, self._image_size)
        resize, crop = self._geometry.resize, self._geometry.size
        return resized_to(sizes, max(1, round(self._image_size * resize / crop)))
