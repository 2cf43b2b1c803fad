"""A pre-norm residual branch on NVIDIA GPUs: LayerNorm of the images that keep it, and its addition.

LayerNorm reads the residual stream once and writes what the branch's first product reads, in its dtype.
Backward adds the branch's gradient to that of the skip connection in the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_TILE_ELEMENTS = 2048
_PROGRAMS = 256  # of the backward of LayerNorm: two for each multiprocessor


def normalized_branch(
    tokens: Tensor, norm: Any, rows: Tensor | None, position: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the tokens for the skip connection, and the LayerNorm of the images in `rows`.

    `rows` are numbers of images, -1 for one that is computed but dropped; `position` is the inverse; None is
    all. Under autocast the norm is in its dtype.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else tokens.dtype
    result: tuple[Tensor, Tensor] = _Normalize.apply(  # type: ignore[no-untyped-call]
        tokens.contiguous(), norm.weight, norm.bias, rows, position, norm.eps, dtype
    )
    return result


def add_branch(
    tokens: Tensor, branch: Tensor, rows: Tensor | None, position: Tensor | None, scale: float
) -> Tensor:
    """Return tokens with `scale` times the branch added, for the images that keep it."""
    result: Tensor = _Add.apply(tokens, branch.contiguous(), rows, position, scale)  # type: ignore[no-untyped-call]
    return result


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor | None,
        position: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        normed, mean, rstd = normalize(tokens, weight, bias, rows, eps, dtype)
        ctx.save_for_backward(tokens, mean, rstd, position, weight)
        return tokens, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_skip: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        grad_tokens, of_weight, of_bias = normalize_backward(grad_skip, grad_normed, *ctx.saved_tensors)
        return grad_tokens, of_weight.sum(0), of_bias.sum(0), None, None, None, None


class _Add(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        branch: Tensor,
        rows: Tensor | None,
        position: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.scale, ctx.images, ctx.dtype = scale, len(branch), branch.dtype
        result: Tensor = add(tokens, branch, position, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return gradient, add_backward(gradient, rows, ctx.images, ctx.scale, ctx.dtype), None, None, None


@torch.library.custom_op("horovod_volo::normalize", mutates_args=())
def normalize(
    tokens: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LayerNorm of the images in `rows`, in `dtype`, and each token's mean and 1 / deviation."""
    from horovod_volo.kernels import residual_kernels as kernels

    normed, mean, rstd = _norm_outputs(tokens, rows, dtype)
    grid, sizes, blocks = _launch(normed)
    kernels.normalize[grid](
        tokens, rows, weight, bias, normed, mean, rstd, *sizes, eps, mapped=rows is not None, **blocks
    )
    return normed, mean, rstd


@torch.library.custom_op("horovod_volo::normalize_backward", mutates_args=())
def normalize_backward(
    grad_skip: Tensor,
    grad_normed: Tensor,
    tokens: Tensor,
    mean: Tensor,
    rstd: Tensor,
    position: Tensor | None,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the tokens, and each program's part of those of weight and bias."""
    from horovod_volo.kernels import residual_kernels as kernels

    grad_skip, grad_normed = grad_skip.contiguous(), grad_normed.contiguous()
    grad_tokens = torch.empty_like(tokens)
    of_weight = tokens.new_empty((_PROGRAMS, tokens.shape[-1]), dtype=torch.float32)
    of_bias = torch.empty_like(of_weight)
    _, sizes, blocks = _launch(tokens)
    kernels.normalize_backward[(_PROGRAMS,)](
        grad_skip, grad_normed, tokens, mean, rstd, position, weight, grad_tokens, of_weight, of_bias,
        *sizes, mapped=position is not None, programs=_PROGRAMS, **blocks,
    )  # fmt: skip
    return grad_tokens, of_weight, of_bias


@torch.library.custom_op("horovod_volo::add_branch", mutates_args=())
def add(tokens: Tensor, branch: Tensor, position: Tensor | None, scale: float) -> Tensor:
    """Return tokens + scale * branch, where the branch was computed."""
    from horovod_volo.kernels import residual_kernels as kernels

    result = torch.empty_like(tokens)
    grid, sizes, blocks = _launch(result)
    kernels.add_branch[grid](
        tokens, branch, position, result, *sizes, scale, mapped=position is not None, **blocks
    )
    return result


@torch.library.custom_op("horovod_volo::add_branch_backward", mutates_args=())
def add_backward(
    gradient: Tensor, rows: Tensor | None, images: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a branch of this many images, in `dtype`."""
    from horovod_volo.kernels import residual_kernels as kernels

    gradient = gradient.contiguous()
    grad_branch = gradient.new_empty((images, *gradient.shape[1:]), dtype=dtype)
    grid, sizes, blocks = _launch(grad_branch)
    kernels.add_branch_backward[grid](
        gradient, rows, grad_branch, *sizes, scale, mapped=rows is not None, **blocks
    )
    return grad_branch


def _norm_outputs(tokens: Tensor, rows: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    images = len(tokens) if rows is None else len(rows)
    normed = tokens.new_empty((images, *tokens.shape[1:]), dtype=dtype)
    mean = tokens.new_empty(normed.shape[:-1], dtype=torch.float32)
    return normed, mean, torch.empty_like(mean)


def _launch(tokens: Tensor) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Return the grid, the sizes and the block sizes of a kernel that writes these tokens."""
    images, channels = len(tokens), tokens.shape[-1]
    count = tokens.numel() // channels
    lanes = 1 << (channels - 1).bit_length()
    tile = max(1, _TILE_ELEMENTS // lanes)
    return (-(-count // tile),), (count, count // images, channels), {"tile": tile, "lanes": lanes}


@normalize.register_fake
def _fake_normalize(
    tokens: Tensor, _weight: Tensor, _bias: Tensor, rows: Tensor | None, _eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _norm_outputs(tokens, rows, dtype)


@normalize_backward.register_fake
def _fake_normalize_backward(
    _skip: Tensor, _normed: Tensor, tokens: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight = tokens.new_empty((_PROGRAMS, tokens.shape[-1]), dtype=torch.float32)
    return torch.empty_like(tokens), of_weight, torch.empty_like(of_weight)


@add.register_fake
def _fake_add(tokens: Tensor, _branch: Tensor, _position: Tensor | None, _scale: float) -> Tensor:
    return torch.empty_like(tokens)


@add_backward.register_fake
def _fake_add_backward(
    gradient: Tensor, _rows: Tensor | None, images: int, _scale: float, dtype: torch.dtype
) -> Tensor:
    return gradient.new_empty((images, *gradient.shape[1:]), dtype=dtype)
