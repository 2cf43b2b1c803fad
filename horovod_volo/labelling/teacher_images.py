"""Images for a teacher that predicts a label map: whole images resized to a square, or their centre crops.

They are read and decoded as evaluation images are. Damaged ones are left out and reported in `problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.core.center_crop import resized_to
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalBatches
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry


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
        self._image_size, self._geometry = image_size, geometry
        self._images = EvalBatches(
            catalog,
            len(catalog),
            Data(batch_size=batch, bad_samples="skip", bad_samples_limit=len(catalog)),
            image_size=image_size,
            resize=self._resized_shapes,
            rank=0,
            size=1,
            device=device,
            threads=threads,
        )

    def batches(self, indices: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield indices and normalised images (batch, 3, image_size, image_size) of what can be decoded."""
        with closing(self._images.decoded(np.array(indices, dtype=np.int64))) as decoded:
            for pending, images in decoded:
                usable = np.flatnonzero(~pending.bad)
                if len(usable) == len(images):
                    yield pending.indices.tolist(), images
                elif len(usable):
                    yield pending.indices[usable].tolist(), images[torch.from_numpy(usable).to(images.device)]
        self.problems += self._images.bad_samples.new_messages()

    def close(self) -> None:
        """End all threads."""
        self._images.close()

    def _resized_shapes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the heights and widths, (batch, 2), before the centre crop."""
        if self._geometry == WHOLE:
            return np.full_like(sizes, self._image_size)
        resize, crop = self._geometry.resize, self._geometry.size
        return resized_to(sizes, max(1, round(self._image_size * resize / crop)))
