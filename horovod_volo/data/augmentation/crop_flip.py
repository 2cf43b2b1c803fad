"""The flips and the random resized crop of each training image.

As in the published code, images are flipped first: a crop box is in pixels of the flipped image.

Invariant: a sample's flips and crop are a pure function of (seed, epoch, sample index) and the image's size,
never of the other samples of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation.policy import interpolations

AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)

ATTEMPTS = 10


@dataclass(frozen=True, eq=False)
class CropFlip:
    """The flips and crop boxes of a batch."""

    boxes: NDArray[np.int32]  # (batch, 4) top, left, height, width in pixels of the flipped image
    flip_horizontal: NDArray[np.bool_]  # (batch,)
    flip_vertical: NDArray[np.bool_]  # (batch,)
    bicubic: NDArray[np.bool_]  # (batch,) interpolation of the crop; else bilinear

    def flipped(self, pixels: Tensor, position: int) -> Tensor:
        """Flip an image (1, 3, height, width) as the one at this position of the batch."""
        dims = [3] * bool(self.flip_horizontal[position]) + [2] * bool(self.flip_vertical[position])
        return pixels.flip(dims) if dims else pixels

    def stored(self, boxes: NDArray[np.int32], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
        """Map boxes (batch, 4) in the flipped image to the stored image, which the decoder crops."""
        return self._mirrored(boxes, sizes).astype(np.int32)

    def fractions(self, sizes: NDArray[np.int64], covered: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the boxes as fractions of the part of the flipped image that label maps cover.

        `covered` (batch, 4) is top, left, height and width of that part, as fractions of the stored image.
        Where a box exceeds the part, the result is below 0 or above 1.
        """
        return self._relative(self.boxes / np.tile(sizes, 2), covered)

    def whole_images(self, covered: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the boxes of whole images as fractions of the part that label maps cover, (batch, 4)."""
        return self._relative(np.tile([0.0, 0.0, 1.0, 1.0], (len(covered), 1)), covered)

    def _relative(self, boxes: NDArray[np.float64], covered: NDArray[np.float64]) -> NDArray[np.float32]:
        return relative_boxes(boxes, self._mirrored(covered, np.ones(2))).astype(np.float32)

    def _mirrored(self, boxes: NDArray[Any], extents: NDArray[Any]) -> NDArray[Any]:
        """Mirror boxes (batch, 4) as the images of these heights and widths (batch, 2) are flipped."""
        flips = np.stack([self.flip_vertical, self.flip_horizontal], axis=1)
        corners = np.where(flips, extents - boxes[:, :2] - boxes[:, 2:], boxes[:, :2])
        return np.concatenate([corners, boxes[:, 2:]], axis=1)


def relative_boxes(boxes: NDArray[AnyFloat], references: NDArray[AnyFloat]) -> NDArray[AnyFloat]:
    """Return boxes as fractions of reference boxes; both (batch, 4) top, left, height, width."""
    corners = (boxes[:, :2] - references[:, :2]) / references[:, 2:]
    return np.concatenate([corners, boxes[:, 2:] / references[:, 2:]], axis=1)


def draw_crops(
    seed: int, epoch: int, indices: NDArray[np.int64], sizes: NDArray[np.int64], settings: Data
) -> CropFlip:
    """Draw flips and crop boxes; `sizes` (batch, 2) are the images' stored heights and widths."""
    draws = uniforms_of_samples(2 * ATTEMPTS + 5, Purpose.CROP_FLIP, seed, epoch, indices)  # (batch, draws)
    shapes = _crop_shapes(draws[:, :ATTEMPTS], draws[:, ATTEMPTS : 2 * ATTEMPTS], sizes, settings)
    fits = shapes[:, 0] > 0
    shapes = np.where(fits[:, None], shapes, _widest_shapes(sizes, settings.ratio))
    margin = sizes - shapes
    corners = np.where(fits[:, None], np.floor(draws[:, -5:-3] * (margin + 1)), margin // 2)  # (batch, 2)
    return CropFlip(
        boxes=np.concatenate([corners, shapes], axis=1).astype(np.int32),
        flip_horizontal=draws[:, -3] < settings.hflip,
        flip_vertical=draws[:, -2] < settings.vflip,
        bicubic=interpolations(draws[:, -1], settings.train_interpolation),
    )


def _crop_shapes(
    area_draws: NDArray[np.float64],
    aspect_draws: NDArray[np.float64],
    sizes: NDArray[np.int64],
    settings: Data,
) -> NDArray[np.int64]:
    """Return the first drawn height and width that fits each image, (0, 0) where none does."""
    low, high = settings.scale
    areas = (low + (high - low) * area_draws) * sizes.prod(axis=1)[:, None]  # (batch, attempts)
    log_low, log_high = np.log(settings.ratio)
    aspects = np.exp(log_low + (log_high - log_low) * aspect_draws)  # width over height
    shapes = np.rint(np.sqrt(np.stack([areas / aspects, areas * aspects], axis=2))).astype(np.int64)
    fits = ((shapes > 0) & (shapes <= sizes[:, None, :])).all(axis=2)  # (batch, attempts)
    first = shapes[np.arange(len(sizes)), fits.argmax(axis=1)]  # (batch, 2)
    return np.where(fits.any(axis=1)[:, None], first, 0)


def _widest_shapes(sizes: NDArray[np.int64], ratio: tuple[float, float]) -> NDArray[np.int64]:
    """Return the largest height and width whose aspect lies within `ratio`."""
    height, width = sizes.T
    aspect = width / height
    return np.stack(
        [
            np.where(aspect < ratio[0], np.rint(width / ratio[0]), height),
            np.where(aspect > ratio[1], np.rint(height * ratio[1]), width),
        ],
        axis=1,
    ).astype(np.int64)  # (batch, 2)
