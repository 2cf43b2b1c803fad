"""The flips and the random resized crop of each training image, and how its label map follows the image.

As in the published code, images are flipped first: a crop box is in pixels of the flipped image. A label map
is flipped with its image, and its cells are warped as geometric operations warp the pixels.

Invariant: a sample's flips and crop are a pure function of (seed, epoch, sample index) and the image's size,
never of the other samples of its batch.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import LabelMaps
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation.operations import GEOMETRIC, source_matrices
from horovod_volo.data.augmentation.policy import Operations, interpolations

AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)

ATTEMPTS = 10
ROUNDING = 1e-6  # of float32 near 1
LabelMap = tuple[NDArray[np.float16], NDArray[np.integer[Any]]]  # scores and ids, (k, height, width)


@dataclass(frozen=True, eq=False)
class CropFlip:
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
        return self.relative(self.boxes / np.tile(sizes, 2), covered)

    def relative(self, boxes: NDArray[np.float64], covered: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return boxes, fractions of the flipped image, as fractions of the part that label maps cover."""
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
    shapes = _crop_shapes(draws, sizes, settings)
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


def _crop_shapes(draws: NDArray[np.float64], sizes: NDArray[np.int64], settings: Data) -> NDArray[np.int64]:
    """Return the first drawn height and width that fits each image, (0, 0) where none does."""
    area_draws, aspect_draws = draws[:, :ATTEMPTS], draws[:, ATTEMPTS : 2 * ATTEMPTS]
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


def augmented_maps(
    maps: list[LabelMap],
    crop_flip: CropFlip,
    operations: Operations,
    sizes: NDArray[np.int64],
    covered: NDArray[np.float64],
    *,
    on_whole_images: bool,
) -> LabelMaps:
    """Flip and warp label maps as their images of these `sizes` are; `covered` are the parts they cover."""
    flips = zip(crop_flip.flip_horizontal, crop_flip.flip_vertical, strict=True)
    turned = [flipped(label_map, *flip) for label_map, flip in zip(maps, flips, strict=True)]
    scores, ids = (np.stack(each) for each in zip(*turned, strict=True))  # (batch, k, height, width) each
    boxes = crop_flip.fractions(sizes, covered)
    covered_by_result = covered_after_warp(boxes, operations.geometric)
    regions, region_sizes = boxes, np.ones_like(sizes)  # a crop is a square when it is warped
    if on_whole_images:
        whole = np.tile([0.0, 0.0, 1.0, 1.0], (len(covered), 1))
        regions, region_sizes = crop_flip.relative(whole, covered), sizes
    scores, ids = warp_maps(scores, ids, regions, operations, region_sizes, covered_by_result)
    boxes = relative_boxes(boxes, covered_by_result)
    reach = max(1.0, float(boxes[:, 2:].max()))
    return LabelMaps(torch.from_numpy(scores), torch.from_numpy(ids), torch.from_numpy(boxes), reach)


def flipped(label_map: LabelMap, horizontal: bool, vertical: bool) -> LabelMap:
    """Flip a map together with its image."""
    flip = (slice(None), slice(None, None, -1 if vertical else 1), slice(None, None, -1 if horizontal else 1))
    return label_map[0][flip], label_map[1][flip]


def covered_after_warp(boxes: NDArray[np.float32], geometric: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the part of its image that each warped map covers, (batch, 4), as fractions of the given map.

    `boxes` (batch, 4) are the crops in the same fractions; `geometric` (batch,) says which images have a
    geometric operation. Their maps are extended to a crop that exceeds them: it may show what the operations
    move out of the given map.
    """
    ends = np.maximum(boxes[:, :2] + boxes[:, 2:], 1)
    starts = np.minimum(boxes[:, :2], 0)
    extended = np.concatenate([starts, ends - starts], axis=1)
    # Rounding may put the end of a box a little above 1; that map is not extended.
    outside = (boxes[:, :2] < 0).any(axis=1) | (boxes[:, :2] + boxes[:, 2:] > 1 + ROUNDING).any(axis=1)
    return np.where((geometric & outside)[:, None], extended, np.array([0, 0, 1, 1], np.float32))


def warp_maps(
    scores: NDArray[np.float16],
    ids: NDArray[np.integer[Any]],
    regions: NDArray[np.float32],
    operations: Operations,
    sizes: NDArray[Any],
    covered: NDArray[np.float32],
) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
    """Return flipped label maps, warped as the geometric operations warp their flipped images.

    scores, ids  (batch, k, height, width)
    regions      (batch, 4) top, left, height, width of what is warped, the crop or the whole image, as
                 fractions of the map
    sizes        (batch, 2) height and width of the region when it is warped, in any unit
    covered      (batch, 4) what the returned map covers, as fractions of the given one

    Outside a map its nearest cell is used. A cell whose source is outside the region, where pixels get FILL,
    gets logits of 0.
    """
    rows = np.flatnonzero(operations.geometric)
    if not len(rows):
        return scores, ids
    scores, ids = scores.copy(), ids.copy()
    height, width = scores.shape[2:]
    corner, fraction = regions[rows, 1::-1, None], regions[rows, :1:-1, None]  # (warped, 2, 1): x, then y
    shapes = sizes[rows].astype(np.float64)
    extent = shapes[:, ::-1, None]  # (warped, 2, 1): x, then y
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=0).reshape(2, -1)  # x, y
    grid = np.array([[[width], [height]]])
    covered_corner, covered_fraction = covered[rows, 1::-1, None], covered[rows, :1:-1, None]
    points = covered_corner + covered_fraction * ((cells + 0.5) / grid)  # (warped, 2, cells) in the given map
    cells_in_map = grid / covered_fraction  # cells of the result per width and height of the given map
    points = (points - corner) * (extent / fraction)  # (warped, 2, cells) in the region, in units of `sizes`
    slack = 0.5 * extent / (fraction * cells_in_map)  # half a cell: those on the edge are inside
    known = np.ones((len(rows), points.shape[2]), dtype=np.bool_)
    for layer in reversed(range(operations.kinds.shape[1])):
        kinds = operations.kinds[rows, layer]
        matrices = source_matrices(kinds, operations.arguments[rows, layer], shapes)
        points = matrices[:, :, :2] @ points + matrices[:, :, 2:]
        inside = ((points >= -slack) & (points < extent + slack)).all(axis=1)
        known &= inside | ~np.isin(kinds, GEOMETRIC)[:, None]
    points = (corner + fraction * points / extent) * np.array([[width], [height]])  # in cells
    column = np.floor(points[:, 0]).clip(0, width - 1).astype(np.int64)
    row = np.floor(points[:, 1]).clip(0, height - 1).astype(np.int64)
    at = (row * width + column)[:, None, :]  # (warped, 1, cells)
    flat = (len(rows), scores.shape[1], height * width)
    sources = np.take_along_axis(scores[rows].reshape(flat), at, axis=2) * known[:, None]
    scores[rows] = sources.reshape(len(rows), *scores.shape[1:])
    ids[rows] = np.take_along_axis(ids[rows].reshape(flat), at, axis=2).reshape(len(rows), *ids.shape[1:])
    return scores, ids
