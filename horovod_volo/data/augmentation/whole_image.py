"""RandAugment on the whole image, before the crop, where no more is decoded than the crop shows.

The published order of token-label runs. Going backwards from the crop, each operation says which part
of the image it needs: the place where the pixels come from, a pixel's neighbours, or, where it counts
colours, the whole image. What is decoded is what the first operation needs.

Invariant: a part holds every pixel of the image that the next part is made of, so that what lies
beyond a part's edge lies beyond the image's edge, too, or is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data.augmentation.apply_ops import COLOR_OPS, GEOMETRIC_OPS, HISTOGRAM_OPS
from horovod_volo.data.augmentation.geometric_ops import source_matrices
from horovod_volo.data.augmentation.rand_augment import GEOMETRIC, Operation, Operations

FILTER_REACH = 2  # pixels that the bicubic filter reads to either side of a place
SMOOTHING_REACH = 1


@dataclass(frozen=True, eq=False)
class Parts:
    """What of each flipped image is at hand before its first operation, and after each one."""

    sizes: NDArray[np.int64]  # (batch, 2) height and width of the flipped image
    boxes: NDArray[np.int64]  # (batch, 1 + layers, 4) top, left, height, width; the last is the crop

    @property
    def decoded(self) -> NDArray[np.int32]:
        """Return what must be decoded, (batch, 4)."""
        return self.boxes[:, 0].astype(np.int32)

    def of(self, place: int) -> Parts:
        """Return those of one image alone."""
        return Parts(self.sizes[place : place + 1], self.boxes[place : place + 1])


def parts_needed(crops: NDArray[np.int32], sizes: NDArray[np.int64], operations: Operations) -> Parts:
    """Work out the parts from the crop boxes (batch, 4) in pixels of the flipped images."""
    last = crops.astype(np.int64)
    low, high = last[:, :2], last[:, :2] + last[:, 2:]  # (batch, 2) first row and column; beyond the last
    boxes = [last]
    for layer in reversed(range(operations.kinds.shape[1])):
        kinds = operations.kinds[:, layer]
        low, high = _sources(low, high, kinds, operations.arguments[:, layer], sizes)
        reach = SMOOTHING_REACH * (kinds == Operation.SHARPNESS)[:, None]
        counts = np.isin(kinds, list(HISTOGRAM_OPS))[:, None]
        low = np.where(counts, 0, low - reach).clip(0, sizes - 1)
        # A crop that shows nothing of the image takes a pixel of its edge: nothing cannot be decoded.
        high = np.where(counts, sizes, high + reach).clip(low + 1, sizes)
        boxes.append(np.concatenate([low, high - low], axis=1))
    return Parts(sizes, np.stack(boxes[::-1], axis=1))


def _sources(
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    kinds: NDArray[np.int64],
    arguments: NDArray[np.float32],
    sizes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bounds of where the pixels between `low` and `high` come from, inside the image or not."""
    matrices = source_matrices(kinds, arguments, sizes)  # (batch, 2, 3) of x, y
    x, y = np.stack([low, high], axis=2)[:, ::-1].transpose(1, 0, 2)  # (batch, 2) each: low and high
    corners = np.stack([x[:, [0, 0, 1, 1]], y[:, [0, 1, 0, 1]]], axis=1)  # (batch, 2, 4)
    sources = (matrices[:, :, :2] @ corners + matrices[:, :, 2:])[:, ::-1]  # (batch, 2, 4) y, then x
    # Along an axis that stays as it is, nothing between pixels is read.
    stays = (matrices == np.eye(2, 3)).all(axis=2)[:, ::-1]  # (batch, 2)
    reach = np.where(stays, 0, FILTER_REACH)
    first = np.floor(sources.min(axis=2)).astype(np.int64) - reach
    last = np.ceil(sources.max(axis=2)).astype(np.int64) + reach
    return first, last


def augment_part(image: Tensor, operations: Operations, parts: Parts) -> Tensor:
    """Turn the decoded part of one flipped uint8 image, (1, 3, height, width), into its augmented crop."""
    if operations.kinds.any():
        image = image.contiguous()  # the decoder has the colours of a pixel side by side
    for layer, kind in enumerate(operations.kinds[0].tolist()):
        before, after = parts.boxes[0, layer], parts.boxes[0, layer + 1]
        if kind in GEOMETRIC:
            matrices = source_matrices(
                operations.kinds[:, layer], operations.arguments[:, layer], parts.sizes
            )
            matrices[:, :, 2] += matrices[:, :, :2] @ after[1::-1] - before[1::-1]
            shape = (int(after[2]), int(after[3]))
            image = GEOMETRIC_OPS[kind](image, matrices, shape, bicubic=bool(operations.bicubic[0, layer]))
            continue
        argument = torch.from_numpy(operations.arguments[:, layer]).to(image.device, non_blocking=True)
        top, left = (after[:2] - before[:2]).tolist()
        part = (..., slice(top, top + int(after[2])), slice(left, left + int(after[3])))
        if kind in HISTOGRAM_OPS:
            image = HISTOGRAM_OPS[kind](image[part], argument, image)
        elif kind in COLOR_OPS:
            image = COLOR_OPS[kind](image, argument)[part]
        else:
            image = image[part]
    return image
