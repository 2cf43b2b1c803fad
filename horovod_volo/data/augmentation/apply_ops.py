"""Applies drawn operations, on the device where the pixels are: to a batch of crops, or to whole images.

On a GPU a kernel may apply a layer of operations to a batch of crops (core/operators.py).

The published training with token labels applies them to the whole image before the crop. Then only the pixels
that the crop depends on are decoded. Going backwards from the crop, each operation needs the source points of
its pixels, their neighbors, or, for a histogram, the whole image.

Invariant: a part contains every pixel of the image that the next part depends on. Points outside a part are
therefore outside the image, or not needed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.core.operators import kernel_of
from horovod_volo.data.augmentation.operations import NONE, OPERATIONS, Kind, source_matrices
from horovod_volo.data.augmentation.policy import Operations

FILTER_REACH = 2  # pixels that the bicubic filter reads on each side of a point
Groups = dict[tuple[Any, bool | None], list[int]]  # rows of a batch by function and interpolation


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, image_size, image_size) in place, one layer after the other.

    The operations are on the host, so nothing here waits for the device.
    """
    kernels = kernel_of("augmentation", images)
    if kernels is not None:
        kernels.augment_(images, operations)
        return
    for layer in range(operations.kinds.shape[1]):
        apply_groups(images, operations, layer, groups_of(operations, layer))


def apply_groups(images: Tensor, operations: Operations, layer: int, groups: Groups) -> None:
    """Apply each function to the images for which it was drawn."""
    kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
    shape = (images.shape[-2], images.shape[-1])
    views = images.unbind()
    for (function, bicubic), rows in groups.items():
        # On a CPU, indexing would cost as much as some operations.
        chosen = (
            images[rows[0] : rows[0] + 1] if len(rows) == 1 else torch.stack([views[row] for row in rows])
        )
        if bicubic is None:
            changed = function(chosen, copy_async(arguments[rows], images.device))
        else:
            matrices = source_matrices(kinds[rows], arguments[rows], np.tile(shape, (len(rows), 1)))
            changed = function(chosen, matrices, shape, bicubic=bicubic)
        for row, image in zip(rows, changed.unbind(), strict=True):
            views[row].copy_(image)


def groups_of(operations: Operations, layer: int) -> Groups:
    """Return the images for each function and interpolation; the latter is None unless it is geometric."""
    kinds, bicubic = operations.kinds[:, layer], operations.bicubic[:, layer]
    groups: Groups = {}
    for row, (kind, is_bicubic) in enumerate(zip(kinds.tolist(), bicubic.tolist(), strict=True)):
        if kind != NONE:
            operation = OPERATIONS[kind]
            interpolation = is_bicubic if operation.kind is Kind.GEOMETRIC else None
            groups.setdefault((operation.function, interpolation), []).append(row)
    return groups


@dataclass(frozen=True, eq=False)
class Parts:
    """The part of each flipped image that is needed before the first operation and after each one."""

    sizes: NDArray[np.int64]  # (batch, 2) height and width of the flipped image
    boxes: NDArray[np.int64]  # (batch, 1 + layers, 4) top, left, height, width; the last is the crop

    @property
    def decoded(self) -> NDArray[np.int32]:
        """Return the part to decode, (batch, 4)."""
        return self.boxes[:, 0].astype(np.int32)

    def of(self, rows: slice) -> "Parts":
        """Return those of some images of the batch."""
        return Parts(self.sizes[rows], self.boxes[rows])


def parts_needed(crops: NDArray[np.int32], sizes: NDArray[np.int64], operations: Operations) -> Parts:
    """Return the parts for crop boxes (batch, 4) in pixels of the flipped images."""
    last = crops.astype(np.int64)
    low, high = last[:, :2], last[:, :2] + last[:, 2:]  # (batch, 2) y, x: first, and one past the last
    boxes = [last]
    for layer in reversed(range(operations.kinds.shape[1])):
        kinds = operations.kinds[:, layer]
        low, high = _sources(low, high, kinds, operations.arguments[:, layer], sizes)
        drawn = [OPERATIONS.get(kind) for kind in kinds.tolist()]  # None: NONE
        neighbors = np.array([each.neighbors if each else 0 for each in drawn])[:, None]
        needs_all = np.array([each is not None and each.kind is Kind.HISTOGRAM for each in drawn])[:, None]
        low = np.where(needs_all, 0, low - neighbors).clip(0, sizes - 1)
        # DALI cannot decode an empty part: a crop that shows only FILL gets one pixel at the edge.
        high = np.where(needs_all, sizes, high + neighbors).clip(low + 1, sizes)
        boxes.append(np.concatenate([low, high - low], axis=1))
    return Parts(sizes, np.stack(boxes[::-1], axis=1))


def _sources(
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    kinds: NDArray[np.int64],
    arguments: NDArray[np.float32],
    sizes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bounds of the source points of the pixels from `low` to `high`, not clipped to the image."""
    matrices = source_matrices(kinds, arguments, sizes)  # (batch, 2, 3) of x, y
    x, y = np.stack([low, high], axis=2)[:, ::-1].transpose(1, 0, 2)  # (batch, 2) each: low and high
    corners = np.stack([x[:, [0, 0, 1, 1]], y[:, [0, 1, 0, 1]]], axis=1)  # (batch, 2, 4)
    sources = (matrices[:, :, :2] @ corners + matrices[:, :, 2:])[:, ::-1]  # (batch, 2, 4) y, then x
    # Along an axis that is not transformed, there is no interpolation.
    unchanged = (matrices == np.eye(2, 3)).all(axis=2)[:, ::-1]  # (batch, 2)
    reach = np.where(unchanged, 0, FILTER_REACH)
    first = np.floor(sources.min(axis=2)).astype(np.int64) - reach
    last = np.ceil(sources.max(axis=2)).astype(np.int64) + reach
    return first, last


def augment_part(image: Tensor, operations: Operations, parts: Parts) -> Tensor:
    """Turn the decoded part of one flipped uint8 image, (1, 3, height, width), into its augmented crop."""
    if operations.kinds.any():
        image = image.contiguous()  # DALI's images are channels-last
    for layer, kind in enumerate(operations.kinds[0].tolist()):
        before, after = parts.boxes[0, layer], parts.boxes[0, layer + 1]
        top, left = (after[:2] - before[:2]).tolist()
        needed = (..., slice(top, top + int(after[2])), slice(left, left + int(after[3])))
        if kind == NONE:
            image = image[needed]
            continue
        function, arguments = OPERATIONS[kind].function, operations.arguments[:, layer]
        if OPERATIONS[kind].kind is Kind.GEOMETRIC:
            matrices = source_matrices(operations.kinds[:, layer], arguments, parts.sizes)
            matrices[:, :, 2] += matrices[:, :, :2] @ after[1::-1] - before[1::-1]
            shape = (int(after[2]), int(after[3]))
            image = function(image, matrices, shape, bicubic=bool(operations.bicubic[0, layer]))
            continue
        argument = copy_async(arguments, image.device)
        if OPERATIONS[kind].kind is Kind.HISTOGRAM:
            image = function(image[needed], argument, image)
        else:
            image = function(image, argument)[needed]
    return image
