"""Augmentation of uint8 crops on NVIDIA GPUs: two kernels for each layer of operations, one to normalise.

Each image has its own operation. Results are those of the plain operators in data/augmentation up to the
rounding of interpolated pixels; colours are equal bit for bit.
"""

import sys
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.core.operators import register_kernel
from horovod_volo.data.augmentation import color_ops, geometric_ops
from horovod_volo.data.augmentation.apply_ops import apply_groups, groups_of
from horovod_volo.data.augmentation.operations import OPERATIONS, source_matrices
from horovod_volo.data.augmentation.policy import Operations

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_BLOCK = 512  # pixels of one program
_STATISTICS_BLOCK = 4096
# Columns of the parameters of an image: operation, whether it is bicubic, argument, then six of a matrix.
COLUMNS = 9
LEVELS = 256


class PixelOp(IntEnum):
    """What the kernels do to an image."""

    COPY = 0
    INVERT = auto()
    POSTERIZE = auto()  # argument: the mask of the bits that stay
    SOLARIZE = auto()
    SOLARIZE_ADD = auto()
    BRIGHTNESS = auto()
    COLOR = auto()
    SHARPNESS = auto()
    AUTO_CONTRAST = auto()  # from here to CONTRAST: by a table of the image's statistics
    EQUALIZE = auto()
    CONTRAST = auto()
    WARP_ALONG_X = auto()  # matrix: pixels per row, pixels
    WARP_ALONG_Y = auto()
    ROTATE = auto()  # matrix: from pixels to coordinates from -1 to 1, the last column less 1


# By the operation's function, which has the same name.
_PIXEL_OPS: dict[Any, PixelOp] = {
    getattr(color_ops if op < PixelOp.WARP_ALONG_X else geometric_ops, op.name.lower()): op
    for op in PixelOp
    if op
}


@torch.library.custom_op("horovod_volo::augment_tables", mutates_args=())
def statistics_tables(images: Tensor, parameters: Tensor) -> Tensor:
    """Return the new value of each level, (batch, 3, 256) uint8, for operations that depend on statistics."""
    from horovod_volo.kernels import augment_kernels as kernels

    tables = _tables(images)
    area = images.shape[2] * images.shape[3]
    kernels.statistics_tables[(3 * len(images),)](
        images, parameters, tables, area, COLUMNS, block=_STATISTICS_BLOCK, enable_fp_fusion=False
    )
    return tables


@torch.library.custom_op("horovod_volo::augment_layer", mutates_args=("result",))
def apply_layer(result: Tensor, images: Tensor, parameters: Tensor, tables: Tensor) -> None:
    """Apply one operation to each of the images (batch, 3, height, width).

    `parameters` is (batch, COLUMNS) float64, because positions are computed in it; see `PixelOp`.
    """
    from horovod_volo.kernels import augment_kernels as kernels

    height, width = images.shape[2:]
    # Without fused multiplication and addition, values are rounded as by separate operators.
    kernels.apply_layer[_grid(images)](
        images, parameters, tables, result, height, width, COLUMNS, block=_BLOCK, enable_fp_fusion=False
    )


@torch.library.custom_op("horovod_volo::normalize_images", mutates_args=())
def normalize_images(
    images: Tensor, mean: Tensor, std: Tensor, boxes: Tensor, noise: Tensor, mode: str
) -> Tensor:
    """Return (images - mean) / std in float32, with boxes overwritten.

    `boxes` are (batch, count, 5) int64: top, left, height, width, and the offset of the box's noise. `mode`
    says what a box gets: "pixel", "rand" or zeros, as in random erasing.
    """
    from horovod_volo.kernels import augment_kernels as kernels

    result = torch.empty_like(images, dtype=torch.float32)
    height, width = images.shape[2:]
    kernels.normalize_images[_grid(images)](
        images, mean, std, boxes, noise, result, height, width,
        count=boxes.shape[1], mode=mode, block=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return result


def _tables(images: Tensor) -> Tensor:
    return images.new_empty((len(images), 3, LEVELS))


def _grid(images: Tensor) -> tuple[int, int]:
    return -(-images.shape[2] * images.shape[3] // _BLOCK), len(images)


statistics_tables.register_fake(lambda images, _parameters: _tables(images))
apply_layer.register_fake(lambda *_: None)
normalize_images.register_fake(lambda images, *_: torch.empty_like(images, dtype=torch.float32))


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images in place. Operations of plugins are applied by their own functions."""
    layers = range(operations.kinds.shape[1])
    if not layers:
        return
    rows = np.stack([_parameters(operations, layer, images.shape[2:]) for layer in layers])
    before, after = images.contiguous(), torch.empty_like(images, memory_format=torch.contiguous_format)
    for layer, parameters in zip(layers, copy_async(rows, images.device), strict=True):
        apply_layer(after, before, parameters, statistics_tables(before, parameters))
        groups = groups_of(operations, layer)
        others = {group: numbers for group, numbers in groups.items() if group[0] not in _PIXEL_OPS}
        apply_groups(after, operations, layer, others)
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
    turned, along_x, along_y = (
        ops == op for op in (PixelOp.ROTATE, PixelOp.WARP_ALONG_X, PixelOp.WARP_ALONG_Y)
    )
    scaled = (matrices * np.array([[2 / width], [2 / height]])).astype(np.float32)
    scaled[:, :, 2] -= 1
    rows[turned, 3:] = scaled[turned].reshape(-1, 6)
    rows[along_x, 3:5], rows[along_y, 3:5] = matrices[along_x, 0, 1:], matrices[along_y, 1][:, ::2]
    return rows


register_kernel("augmentation", sys.modules[__name__])  # for `augment_` and `normalize_images`
