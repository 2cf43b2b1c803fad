"""How rotation, shear and translation move pixels, and the cells of a label map with them.

A matrix gives, for a point of the moved image, the point of the image before; both in pixels of the
crop, whose corner is (0, 0). Pixels and label maps go through the same matrices: that is what keeps
them together.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data.rand_augment import GEOMETRIC, Operation, Operations

FILL = (124, 116, 104)  # the mean colour


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


def move(images: Tensor, matrices: NDArray[np.float64], *, bicubic: bool) -> Tensor:
    """Move uint8 images (batch, 3, side, side); what was outside becomes the fill colour."""
    batch, _, side, _ = images.shape
    ends = torch.as_tensor(matrices, dtype=torch.float32).to(images.device)
    centres = torch.arange(side, device=images.device) + 0.5
    down, across = torch.meshgrid(centres, centres, indexing="ij")
    places = torch.stack([across, down, torch.ones_like(down)], dim=-1)  # (side, side, 3)
    source = (places.view(1, -1, 3) @ ends.transpose(1, 2)).view(batch, side, side, 2)
    moved = torch.nn.functional.grid_sample(
        images.float().contiguous(),
        source * (2 / side) - 1,
        mode="bicubic" if bicubic else "bilinear",
        padding_mode="border",
        align_corners=False,
    )
    inside = ((source >= 0) & (source < side)).all(dim=-1).unsqueeze(1)  # (batch, 1, side, side)
    fill = torch.tensor(FILL, dtype=torch.uint8, device=images.device).view(1, 3, 1, 1)
    return torch.where(inside, (moved + 0.5).clamp(0, 255).to(torch.uint8), fill)


def moved_maps(
    scores: NDArray[np.float16],
    ids: NDArray[np.int32],
    boxes: NDArray[np.float32],
    operations: Operations,
) -> tuple[NDArray[np.float16], NDArray[np.int32]]:
    """Move flipped label maps (batch, k, height, width) as their crops are moved.

    `boxes` (batch, 4) are the crops as shares of the flipped image. A cell whose content comes from
    outside the crop, where the pixels are filled, knows nothing: its logits become 0.
    """
    rows = np.flatnonzero(operations.moving)
    if not len(rows):
        return scores, ids
    scores, ids = scores.copy(), ids.copy()
    height, width = scores.shape[2:]
    corner, extent = boxes[rows, 1::-1, None], boxes[rows, :1:-1, None]  # (moved, 2, 1): x, then y
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=0).reshape(2, -1)  # x, y
    places = (cells + 0.5) / np.array([[width], [height]])  # (2, cells) shares of the flipped image
    places = (places[None] - corner) / extent  # (moved, 2, cells) shares of the crop
    slack = 0.5 / (extent * np.array([[width], [height]]))  # cells cut by the crop's edge belong to it
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
