"""Augmentation of uint8 crops on NVIDIA GPUs: two kernels for each layer of operations, one to normalise.

Each image has its own operation. Results are those of the plain operators in data/augmentation up to the
rounding of interpolated pixels; colours are equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_BLOCK = 512  # pixels of one program
_STATISTICS_BLOCK = 4096
# Columns of the parameters of an image: operation, whether it is bicubic, argument, then six of a matrix.
COLUMNS = 9
LEVELS = 256


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

    `parameters` is (batch, COLUMNS) float64, because positions are computed in it; see `codes.PixelOp`.
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


@statistics_tables.register_fake
def _fake_statistics_tables(images: Tensor, _parameters: Tensor) -> Tensor:
    return _tables(images)


@apply_layer.register_fake
def _fake_apply_layer(_result: Tensor, _images: Tensor, _parameters: Tensor, _tables: Tensor) -> None:
    pass


@normalize_images.register_fake
def _fake_normalize_images(
    images: Tensor, _mean: Tensor, _std: Tensor, _boxes: Tensor, _noise: Tensor, _mode: str
) -> Tensor:
    return torch.empty_like(images, dtype=torch.float32)
