"""Moves the cells of label maps as geometric operations move the pixels of their images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.data.augmentation.operations import GEOMETRIC, source_matrices
from horovod_volo.data.augmentation.rand_augment import Operations

ROUNDING = 1e-6  # of float32 near 1


def moved_frames(boxes: NDArray[np.float32], moving: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return what each map covers after the operations, (batch, 4), as fractions of the map before.

    `boxes` (batch, 4) are the crops as such fractions, `moving` (batch,) says which maps are moved. A map is
    widened to a crop that exceeds it, so that content which moves outside the map before is not lost.
    """
    ends = np.maximum(boxes[:, :2] + boxes[:, 2:], 1)
    starts = np.minimum(boxes[:, :2], 0)
    widened = np.concatenate([starts, ends - starts], axis=1)
    # Rounding may put the end of a box a little above 1; that map is not widened.
    outside = (boxes[:, :2] < 0).any(axis=1) | (boxes[:, :2] + boxes[:, 2:] > 1 + ROUNDING).any(axis=1)
    return np.where((moving & outside)[:, None], widened, np.array([0, 0, 1, 1], np.float32))


def moved_maps(
    scores: NDArray[np.float16],
    ids: NDArray[np.integer[Any]],
    canvases: NDArray[np.float32],
    operations: Operations,
    sizes: NDArray[Any] | float = 1.0,
    frames: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
    """Transform flipped label maps (batch, k, height, width) as their images are transformed.

    `canvases` (batch, 4) are what the operations work on, crops or whole images, as fractions of what the
    maps cover of the flipped images. `sizes` (batch, 2) are the heights and widths of the canvases when the
    operations are applied, in any unit: a crop has been resized to a square. `frames` (batch, 4), as such
    fractions too, are what the maps cover afterwards; None: the same. Outside a map its nearest cell is used.
    A cell whose source is outside the canvas, where pixels are filled, gets logits of 0.
    """
    rows = np.flatnonzero(operations.moving)
    if not len(rows):
        return scores, ids
    scores, ids = scores.copy(), ids.copy()
    height, width = scores.shape[2:]
    corner, fraction = canvases[rows, 1::-1, None], canvases[rows, :1:-1, None]  # (moved, 2, 1): x, then y
    shapes = np.broadcast_to(np.asarray(sizes, dtype=np.float64), (len(scores), 2))[rows]
    extent = shapes[:, ::-1, None]  # (moved, 2, 1): x, then y
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=0).reshape(2, -1)  # x, y
    grid = np.array([[[width], [height]]])
    points = (cells + 0.5) / grid  # (1, 2, cells) fractions of the result
    cells_in_map = grid  # in as much as the map covered before
    if frames is not None:
        frame_corner, frame_fraction = frames[rows, 1::-1, None], frames[rows, :1:-1, None]
        points = frame_corner + frame_fraction * points  # (moved, 2, cells) fractions of the map before
        cells_in_map = grid / frame_fraction
    points = (points - corner) * (extent / fraction)  # (moved, 2, cells) in the canvas
    slack = 0.5 * extent / (fraction * cells_in_map)  # cells on its edge belong to it
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
    at = (row * width + column)[:, None, :]  # (moved, 1, cells)
    flat = (len(rows), scores.shape[1], height * width)
    kept = np.take_along_axis(scores[rows].reshape(flat), at, axis=2) * known[:, None]
    scores[rows] = kept.reshape(len(rows), *scores.shape[1:])
    ids[rows] = np.take_along_axis(ids[rows].reshape(flat), at, axis=2).reshape(len(rows), *ids.shape[1:])
    return scores, ids
