"""Applies drawn operations to a batch of crops, on the device where they are.

On a GPU one kernel applies a layer of operations to the whole batch. Operations of plugins, for which it has
no code, are applied by their own functions, as all operations are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.data.augmentation import color_ops, geometric_ops
from horovod_volo.data.augmentation.operations import NONE, OPERATIONS, Kind, source_matrices
from horovod_volo.data.augmentation.rand_augment import Mixing, Operations
from horovod_volo.kernels import runs_kernel
from horovod_volo.kernels.augment import COLUMNS, apply_layer, statistics_tables
from horovod_volo.kernels.codes import PixelOp

_PIXEL_OPS: dict[Any, PixelOp] = {
    color_ops.auto_contrast: PixelOp.AUTO_CONTRAST,
    color_ops.equalize: PixelOp.EQUALIZE,
    color_ops.invert: PixelOp.INVERT,
    color_ops.posterize: PixelOp.POSTERIZE,
    color_ops.solarize: PixelOp.SOLARIZE,
    color_ops.solarize_add: PixelOp.SOLARIZE_ADD,
    color_ops.brightness: PixelOp.BRIGHTNESS,
    color_ops.contrast: PixelOp.CONTRAST,
    color_ops.color: PixelOp.COLOR,
    color_ops.sharpness: PixelOp.SHARPNESS,
    geometric_ops.rotate: PixelOp.ROTATE,
    geometric_ops.warp_along_x: PixelOp.ALONG_X,
    geometric_ops.warp_along_y: PixelOp.ALONG_Y,
}
Groups = dict[tuple[Any, bool | None], list[int]]  # rows of a batch by function and interpolation


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, image_size, image_size) in place, one layer after the other.

    The operations are on the host, so nothing here waits for the device.
    """
    if operations.mixing is not None:
        _mix_chains(images, operations, operations.mixing)
        return
    if runs_kernel("augmentation", images):
        _augment_by_kernels(images, operations)
        return
    for layer in range(operations.kinds.shape[1]):
        groups = _groups(operations.kinds[:, layer], operations.bicubic[:, layer])
        _apply_groups(images, operations, layer, groups)


def _mix_chains(images: Tensor, operations: Operations, mixing: Mixing) -> None:
    """Mix what the chains of AugMix make of the images, and blend it with them, rounding as Pillow does."""
    weights = copy_async(mixing.weights, images.device)[..., None, None, None]  # (batch, chains, 1, 1, 1)
    mixture = torch.zeros_like(images, dtype=torch.float32)
    for number, chain in enumerate(operations.chains()):
        changed = images.clone()
        augment_(changed, chain)
        mixture.addcmul_(changed.float(), weights[:, number])
    before = images.float()
    shares = copy_async(mixing.shares, images.device).view(-1, 1, 1, 1)
    blended = mixture.clamp_(0, 255).floor_().sub_(before).mul_(shares).add_(before)
    images.copy_(blended.to(torch.uint8))


def _apply_groups(images: Tensor, operations: Operations, layer: int, groups: Groups) -> None:
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


def _augment_by_kernels(images: Tensor, operations: Operations) -> None:
    layers = range(operations.kinds.shape[1])
    if not layers:
        return
    rows = np.stack([_parameters(operations, layer, images.shape[2:]) for layer in layers])
    before, after = images.contiguous(), torch.empty_like(images, memory_format=torch.contiguous_format)
    for layer, parameters in zip(layers, copy_async(rows, images.device), strict=True):
        apply_layer(after, before, parameters, statistics_tables(before, parameters))
        groups = _groups(operations.kinds[:, layer], operations.bicubic[:, layer])
        others = {group: numbers for group, numbers in groups.items() if group[0] not in _PIXEL_OPS}
        _apply_groups(after, operations, layer, others)
        before, after = after, before
    if before is not images:
        images.copy_(before)


def _parameters(operations: Operations, layer: int, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return what the kernels need to know of each image, (batch, COLUMNS); see `PixelOp`."""
    kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
    height, width = shape
    ops = np.array([_PIXEL_OPS.get(OPERATIONS[kind].function, 0) if kind else 0 for kind in kinds.tolist()])
    matrices = source_matrices(kinds, arguments, np.tile([height, width], (len(kinds), 1)))
    rows = np.zeros((len(kinds), COLUMNS))
    rows[:, 0], rows[:, 1], rows[:, 2] = ops, operations.bicubic[:, layer], arguments
    masks = ops == PixelOp.POSTERIZE
    rows[masks, 2] = np.floor(256 - 2 ** (8 - arguments[masks])) % 256
    turned, along_x, along_y = (ops == op for op in (PixelOp.ROTATE, PixelOp.ALONG_X, PixelOp.ALONG_Y))
    scaled = (matrices * np.array([[2 / width], [2 / height]])).astype(np.float32)
    scaled[:, :, 2] -= 1
    rows[turned, 3:] = scaled[turned].reshape(-1, 6)
    rows[along_x, 3:5], rows[along_y, 3:5] = matrices[along_x, 0, 1:], matrices[along_y, 1][:, ::2]
    return rows


def _groups(kinds: NDArray[np.int64], bicubic: NDArray[np.bool_]) -> Groups:
    """Return the images for each function and interpolation; the latter is None unless it is geometric."""
    groups: Groups = {}
    for row, (kind, is_bicubic) in enumerate(zip(kinds.tolist(), bicubic.tolist(), strict=True)):
        if kind != NONE:
            operation = OPERATIONS[kind]
            interpolation = is_bicubic if operation.kind is Kind.GEOMETRIC else None
            groups.setdefault((operation.function, interpolation), []).append(row)
    return groups
