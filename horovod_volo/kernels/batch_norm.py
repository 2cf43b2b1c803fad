"""BatchNorm in training and the ReLU after it as one operator on NVIDIA GPUs.

Backward recomputes ReLU's mask from the images before BatchNorm, so that ReLU reads and writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_TILE_ELEMENTS = 2048
_PROGRAMS = 1024  # of the kernels that sum over the batch: several for each multiprocessor
_COMBINED = {"tile": 128, "lanes": 16}  # of the kernel that combines their statistics


def batch_norm_relu(images: Tensor, norm: Any) -> Tensor:
    """Return relu(norm(images)) in channels-last memory, for a BatchNorm2d that updates its statistics."""
    result: Tensor = _NormalizeReLU.apply(  # type: ignore[no-untyped-call]
        images.contiguous(memory_format=torch.channels_last),
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.momentum,
        norm.eps,
    )
    return result


class _NormalizeReLU(Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        result: Tensor
        result, mean, rstd = normalize(images, weight, bias, running_mean, running_var, momentum, eps)
        ctx.save_for_backward(images, mean, rstd, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_images, sums = normalize_backward(gradient, *ctx.saved_tensors)
        of_bias, of_weight = sums
        return grad_images, of_weight, of_bias, None, None, None, None


@torch.library.custom_op("horovod_volo::batch_norm_relu", mutates_args=("running_mean", "running_var"))
def normalize(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and the mean and 1 / deviation of each channel."""
    from horovod_volo.kernels import batch_norm_kernels as kernels

    result, mean, rstd = outputs = _outputs(images)
    grid, sizes, blocks = _launch(images)
    parts = mean.new_empty((_PROGRAMS, 3, *mean.shape))
    kernels.statistics[(_PROGRAMS,)](images, parts, *sizes, programs=_PROGRAMS, **blocks)
    kernels.combine[(-(-len(mean) // _COMBINED["lanes"]),)](
        parts, mean, rstd, running_mean, running_var, *sizes, momentum, eps, programs=_PROGRAMS, **_COMBINED
    )
    kernels.normalize_relu[grid](images, mean, rstd, weight, bias, result, *sizes, **blocks)
    return outputs


@torch.library.custom_op("horovod_volo::batch_norm_relu_backward", mutates_args=())
def normalize_backward(
    gradient: Tensor, images: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the images, and those of bias and weight, (2, channels)."""
    from horovod_volo.kernels import batch_norm_kernels as kernels

    inputs = (gradient.contiguous(memory_format=torch.channels_last), images, mean, rstd, weight, bias)
    grid, sizes, blocks = _launch(images)
    parts = mean.new_empty((_PROGRAMS, 2, *mean.shape))
    kernels.gradient_sums[(_PROGRAMS,)](*inputs, parts, *sizes, programs=_PROGRAMS, **blocks)
    sums, grad_images = parts.sum(0), torch.empty_like(images)
    kernels.gradient_of_images[grid](*inputs, sums, grad_images, *sizes, **blocks)
    return grad_images, sums


def _outputs(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = images.new_empty(images.shape[1], dtype=torch.float32)
    return torch.empty_like(images), mean, torch.empty_like(mean)


def _launch(images: Tensor) -> tuple[tuple[int], tuple[int, int], dict[str, int]]:
    """Return the grid, the sizes and the block sizes of a kernel over all pixels."""
    channels = images.shape[1]
    count = images.numel() // channels
    lanes = 1 << (channels - 1).bit_length()
    tile = max(1, _TILE_ELEMENTS // lanes)
    return (-(-count // tile),), (count, channels), {"tile": tile, "lanes": lanes}


@normalize.register_fake
def _fake_normalize(images: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(images)


@normalize_backward.register_fake
def _fake_normalize_backward(_gradient: Tensor, images: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(images), images.new_empty((2, images.shape[1]), dtype=torch.float32)
