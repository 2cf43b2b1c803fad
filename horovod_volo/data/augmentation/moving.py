"""How rotation, shear and translation move pixels, and the cells of a label map with them.

A matrix gives, for a point of the moved image, the point of the image before; both in pixels of the
crop, whose corner is (0, 0). Pixels and label maps go through the same matrices: that is what keeps
them together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data.augmentation.rand_augment import GEOMETRIC, Operation, Operations

FILL = (124, 116, 104)  # the mean colour
ROUNDING = 1e-6  # of single precision, near 1


def source_matrices(
    kinds: NDArray[np.int64], arguments: NDArray[np.float32], side: int
) -> NDArray[np.float64]:
    """Return for each image the matrix of one operation, (batch, 2, 3); kinds and arguments are (batch,)."""
    amount = arguments.astype(np.float64)
    matrices = np.tile(np.eye(2, 3), (len(kinds), 1, 1))  # (batch, 2, 3)
    angle = np.radians(np.where(kinds == Operation.ROTATE, amount, 0))
    matrices[:, 0, 0] = matrices[:, 1, 1] = np.cos(angle)
    matrices[:, 0, 1], matrices[:, 1, 0] = -np.sin(angle), np.sin(angle)
    matrices[:, 0, 1] += np.where(kinds == Operation.SHEAR_X, amount, 0)
    matrices[:, 1, 0] += np.where(kinds == Operation.SHEAR_Y, amount, 0)
    centre = np.full(2, side / 2)
    turned = (kinds == Operation.ROTATE)[:, None]
    matrices[:, :, 2] = np.where(turned, centre - matrices[:, :, :2] @ centre, 0)
    matrices[:, 0, 2] += np.where(kinds == Operation.TRANSLATE_X, amount * side, 0)
    matrices[:, 1, 2] += np.where(kinds == Operation.TRANSLATE_Y, amount * side, 0)
    return matrices


def turn(images: Tensor, matrices: NDArray[np.float64], *, bicubic: bool) -> Tensor:
    """Move uint8 images (batch, 3, side, side) anywhere; what was outside becomes the fill colour."""
    side = images.shape[-1]
    ends = _on(images.device, matrices)[..., None, None] * (2 / side)
    centres = torch.arange(side, device=images.device) + 0.5
    # The source of each pixel, as grid_sample wants it: shares of the side, from -1 to 1; first x, then y.
    source = ends[:, :, 0] * centres + (ends[:, :, 1] * centres[:, None] + (ends[:, :, 2] - 1))
    moved = torch.nn.functional.grid_sample(
        images.float(),
        source.permute(0, 2, 3, 1),  # from (batch, 2, side, side)
        mode="bicubic" if bicubic else "bilinear",
        padding_mode="border",
        align_corners=False,
    )
    x, y = source.abs_().unbind(dim=1)
    return _colours(moved, torch.maximum(x, y) >= 1)


def slide_across(images: Tensor, matrices: NDArray[np.float64], *, bicubic: bool) -> Tensor:
    """Move each row of uint8 images (batch, 3, side, side) by itself: several times as fast as turning."""
    side = images.shape[-1]
    centres = np.arange(side) + 0.5
    by_row = matrices[:, 0, 1, None] * centres + matrices[:, 0, 2, None]  # (batch, side) pixels
    shift = _on(images.device, by_row)[:, None, :, None]
    whole = shift.floor()
    weights = (_bicubic if bicubic else _linear)(shift - whole)
    before = len(weights) // 2 - 1
    reach = torch.arange(-before, side + len(weights) - before - 1, device=images.device)
    at = (reach + whole.long()).clamp_(0, side - 1)  # (batch, 1, side, side and what the filter needs beside)
    read = images.float().gather(3, at.expand(-1, 3, -1, -1))
    moved = read[..., :side] * weights[0]
    for place, weight in enumerate(weights[1:], 1):
        moved.addcmul_(read[..., place : place + side], weight)
    source = torch.arange(side, device=images.device) + (shift[:, 0] + 0.5)
    return _colours(moved, (source < 0) | (source >= side))


def slide_down(images: Tensor, matrices: NDArray[np.float64], *, bicubic: bool) -> Tensor:
    """Move each column by itself."""
    axes_exchanged = np.ascontiguousarray(matrices[:, ::-1, [1, 0, 2]])
    return slide_across(images.mT, axes_exchanged, bicubic=bicubic).mT


def _linear(beyond: Tensor) -> list[Tensor]:
    """Weigh two neighbours; a place is so far beyond the first."""
    return [1 - beyond, beyond]


def _bicubic(beyond: Tensor) -> list[Tensor]:
    """Weigh four neighbours as Pillow does; a place is so far beyond the second."""
    ahead = 1 - beyond
    near, next_ = ((distance - 2) * distance * distance + 1 for distance in (beyond, ahead))
    far, last = (-beyond * ahead * ahead, -ahead * beyond * beyond)
    return [far, near, next_, last]


def _on(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Bring numbers to the device without waiting for it."""
    return torch.from_numpy(values.astype(np.float32)).to(device, non_blocking=True)


def _colours(moved: Tensor, outside: Tensor) -> Tensor:
    """Cut off decimals, as Pillow does, and fill in; `outside` is (batch, side, side)."""
    # By way of 16 bits, and with masks of bits: each several times faster than the straight way.
    colours = moved.clamp_(0, 255).to(torch.int16).to(torch.uint8)
    filled = outside.to(torch.uint8).mul_(255).unsqueeze(1)
    fill = _on(moved.device, np.array(FILL)).to(torch.uint8).view(1, 3, 1, 1)
    return colours.bitwise_and_(~filled).bitwise_or_(filled & fill)


def moved_frames(boxes: NDArray[np.float32], moving: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return where the cells of each map lie once it is moved, (batch, 4), as fractions of the map before.

    `boxes` (batch, 4) are the crops as such fractions, `moving` (batch,) says which are moved. A map beyond
    which its crop reaches is widened to it: what moves from the map to where it had no cells is not lost.
    """
    ends = np.maximum(boxes[:, :2] + boxes[:, 2:], 1)
    starts = np.minimum(boxes[:, :2], 0)
    widened = np.concatenate([starts, ends - starts], axis=1)
    # A box that ends at 1 may be rounded to end a little beyond: that map stays as it is.
    outside = (boxes[:, :2] < 0).any(axis=1) | (boxes[:, :2] + boxes[:, 2:] > 1 + ROUNDING).any(axis=1)
    return np.where((moving & outside)[:, None], widened, np.array([0, 0, 1, 1], np.float32))


def moved_maps(
    scores: NDArray[np.float16],
    ids: NDArray[np.integer[Any]],
    boxes: NDArray[np.float32],
    operations: Operations,
    frames: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
    """Move flipped label maps (batch, k, height, width) as their crops are moved.

    `boxes` (batch, 4) are the crops as fractions of what the maps cover of the flipped images, `frames` of
    what they cover afterwards; None: the same. Beyond a map its nearest cell counts. A cell whose content
    comes from outside the crop, where the pixels are filled, knows nothing: its logits become 0.
    """
    rows = np.flatnonzero(operations.moving)
    if not len(rows):
        return scores, ids
    scores, ids = scores.copy(), ids.copy()
    height, width = scores.shape[2:]
    corner, extent = boxes[rows, 1::-1, None], boxes[rows, :1:-1, None]  # (moved, 2, 1): x, then y
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=0).reshape(2, -1)  # x, y
    grid = np.array([[[width], [height]]])
    places = (cells + 0.5) / grid  # (1, 2, cells) fractions of the moved map
    cells_in_map = grid  # of the moved map, in what the map covered before
    if frames is not None:
        frame_corner, frame_extent = frames[rows, 1::-1, None], frames[rows, :1:-1, None]
        places = frame_corner + frame_extent * places  # (moved, 2, cells) fractions of the map before
        cells_in_map = grid / frame_extent
    places = (places - corner) / extent  # (moved, 2, cells) fractions of the crop
    slack = 0.5 / (extent * cells_in_map)  # cells cut by the crop's edge belong to it
    known = np.ones((len(rows), places.shape[2]), dtype=np.bool_)
    for layer in reversed(range(operations.kinds.shape[1])):
        kinds = operations.kinds[rows, layer]
        matrices = source_matrices(kinds, operations.arguments[rows, layer], side=1)
        places = matrices[:, :, :2] @ places + matrices[:, :, 2:]
        inside = ((places >= -slack) & (places < 1 + slack)).all(axis=1)
        known &= inside | ~np.isin(kinds, GEOMETRIC)[:, None]
    places = (corner + extent * places) * np.array([[width], [height]])  # (moved, 2, cells) in cells
    column = np.floor(places[:, 0]).clip(0, width - 1).astype(np.int64)
    row = np.floor(places[:, 1]).clip(0, height - 1).astype(np.int64)
    at = (row * width + column)[:, None, :]  # (moved, 1, cells)
    flat = (len(rows), scores.shape[1], height * width)
    kept = np.take_along_axis(scores[rows].reshape(flat), at, axis=2) * known[:, None]
    scores[rows] = kept.reshape(len(rows), *scores.shape[1:])
    ids[rows] = np.take_along_axis(ids[rows].reshape(flat), at, axis=2).reshape(len(rows), *ids.shape[1:])
    return scores, ids
