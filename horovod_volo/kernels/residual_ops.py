"""The operators of residual branches on NVIDIA GPUs: their launches, and the shapes of their results.

`rows` are numbers of images, -1 for one that is computed but dropped; `position` is the inverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horovod_volo.kernels.codes import RowMapping

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_TILE_ELEMENTS = 2048
_PROGRAMS = 256  # of the backward of LayerNorm: two for each multiprocessor


@torch.library.custom_op("horovod_volo::normalize", mutates_args=())
def normalize(
    tokens: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LayerNorm of the images in `rows`, in `dtype`, and each token's mean and 1 / deviation."""
    from horovod_volo.kernels import residual_kernels as kernels

    normed, mean, rstd = _norm_outputs(tokens, len(tokens if rows is None else rows), dtype)
    grid, sizes, blocks = _launch(normed)
    kernels.normalize[grid](
        tokens, rows, weight, bias, normed, mean, rstd, *sizes, eps, mapped=rows is not None, **blocks
    )
    return normed, mean, rstd


@torch.library.custom_op("horovod_volo::normalize_backward", mutates_args=())
def normalize_backward(
    grad_skip: Tensor | None,
    grad_normed: Tensor,
    tokens: Tensor,
    mean: Tensor,
    rstd: Tensor,
    position: Tensor | None,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the tokens, and each program's part of those of weight and bias."""
    grad_tokens, parts = torch.empty_like(tokens), _parts(tokens, 2)
    skip = None if grad_skip is None else grad_skip.contiguous()
    inputs = (skip, grad_normed.contiguous(), tokens, mean, rstd, position, weight)
    _launch_backward(inputs, None, grad_tokens, grad_tokens, parts, 0.0, branch_mapping=None)
    return grad_tokens, parts


@torch.library.custom_op("horovod_volo::add_normalize", mutates_args=())
def add_normalize(
    tokens: Tensor,
    branch: Tensor,
    position: Tensor | None,
    scale: float,
    weight: Tensor,
    bias: Tensor,
    next_position: Tensor | None,
    images: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens + scale * branch, and its LayerNorm for the next branch, which computes `images` images.

    Also return each normalized token's mean and 1 / deviation.
    """
    from horovod_volo.kernels import residual_kernels as kernels

    outputs = _added_outputs(tokens, images, dtype)
    result, *normed = outputs
    grid, sizes, blocks = _launch(tokens)
    kernels.add_normalize[grid](
        tokens, branch, position, result, next_position, weight, bias, *normed, *sizes, scale, eps,
        mapping=_mapping(position, tokens, len(branch)),
        next_mapping=_mapping(next_position, tokens, images),
        **blocks,
    )  # fmt: skip
    return outputs


@torch.library.custom_op("horovod_volo::add_normalize_backward", mutates_args=())
def add_normalize_backward(
    grad_skip: Tensor,
    grad_normed: Tensor,
    tokens: Tensor,
    mean: Tensor,
    rstd: Tensor,
    next_position: Tensor | None,
    weight: Tensor,
    position: Tensor | None,
    images: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the tokens and of the branch, and programs' parts of those of vectors.

    The vectors are LayerNorm's weight and bias, and the bias of the branch's last product.
    """
    outputs = grad_tokens, grad_branch, parts = _added_gradients(tokens, images, dtype)
    inputs = (grad_skip.contiguous(), grad_normed.contiguous(), tokens, mean, rstd, next_position, weight)
    branch_mapping = _mapping(position, tokens, images)
    _launch_backward(inputs, position, grad_tokens, grad_branch, parts, scale, branch_mapping=branch_mapping)
    return outputs


def _launch_backward(inputs: tuple[Tensor | None, ...], *others: Any, branch_mapping: int | None) -> None:
    """Launch the backward of LayerNorm; `branch_mapping` is None if no branch was added before it."""
    from horovod_volo.kernels import residual_kernels as kernels

    _, grad_normed, tokens, _, _, position, _ = inputs
    assert grad_normed is not None
    assert tokens is not None
    *tensors, scale = others
    _, sizes, blocks = _launch(tokens)
    kernels.normalize_backward[(_PROGRAMS,)](
        *inputs, *tensors, *sizes, scale,
        mapping=_mapping(position, tokens, len(grad_normed)),
        branched=branch_mapping is not None,
        branch_mapping=branch_mapping or 0,
        programs=_PROGRAMS,
        **blocks,
    )  # fmt: skip


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


def _norm_outputs(tokens: Tensor, images: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    normed = tokens.new_empty((images, *tokens.shape[1:]), dtype=dtype)
    mean = tokens.new_empty(normed.shape[:-1], dtype=torch.float32)
    return normed, mean, torch.empty_like(mean)


def _added_outputs(tokens: Tensor, images: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(tokens), *_norm_outputs(tokens, images, dtype)


def _added_gradients(tokens: Tensor, images: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    branch = tokens.new_empty((images, *tokens.shape[1:]), dtype=dtype)
    return torch.empty_like(tokens), branch, _parts(tokens, 3)


def _parts(tokens: Tensor, vectors: int) -> Tensor:
    return tokens.new_empty((_PROGRAMS, vectors, tokens.shape[-1]), dtype=torch.float32)


def _mapping(position: Tensor | None, tokens: Tensor, images: int) -> int:
    """Return how a branch that computes this many images maps to those of the batch.

    One by index computes fewer than all.
    """
    if position is None:
        return int(RowMapping.ALL)
    return int(RowMapping.MASKED if images == len(tokens) else RowMapping.INDEXED)


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
    return _norm_outputs(tokens, len(tokens if rows is None else rows), dtype)


@normalize_backward.register_fake
def _fake_normalize_backward(
    _skip: Tensor | None, _normed: Tensor, tokens: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), _parts(tokens, 2)


@add_normalize.register_fake
def _fake_add_normalize(
    tokens: Tensor,
    _branch: Tensor,
    _position: Tensor | None,
    _scale: float,
    _weight: Tensor,
    _bias: Tensor,
    _next_position: Tensor | None,
    images: int,
    _eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _added_outputs(tokens, images, dtype)


@add_normalize_backward.register_fake
def _fake_add_normalize_backward(
    _skip: Tensor, _normed: Tensor, tokens: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, images, _, dtype = others
    return _added_gradients(tokens, images, dtype)


@add.register_fake
def _fake_add(tokens: Tensor, _branch: Tensor, _position: Tensor | None, _scale: float) -> Tensor:
    return torch.empty_like(tokens)


@add_backward.register_fake
def _fake_add_backward(
    gradient: Tensor, _rows: Tensor | None, images: int, _scale: float, dtype: torch.dtype
) -> Tensor:
    return gradient.new_empty((images, *gradient.shape[1:]), dtype=dtype)
