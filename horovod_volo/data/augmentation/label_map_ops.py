"""Warps the cells of label maps as geometric operations warp the pixels of their images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.batch import LabelMaps
from horovod_volo.data.augmentation.crop_flip import CropFlip, relative_boxes
from horovod_volo.data.augmentation.operations import GEOMETRIC, source_matrices
from horovod_volo.data.augmentation.policy import Operations

ROUNDING = 1e-6  # of float32 near 1
LabelMap = tuple[NDArray[np.float16], NDArray[np.integer[Any]]]  # scores and ids, (k, height, width)


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
        regions, region_sizes = crop_flip.whole_images(covered), sizes
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
