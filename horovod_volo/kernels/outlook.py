"""Outlook attention of 3 x 3 windows, 2 apart, on an NVIDIA GPU, without unfolded windows in memory.

Invariant: what is kept for backward are the inputs alone; the softmax is done again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from horovod_volo.kernels import outlook_programs

# Of a program of four warps: fewer than threads, so that each thread loads the numbers of its own cell.
_CELLS = 32


@torch.library.custom_op("horovod_volo::outlook_fused", mutates_args=())
def fused_outlook(values: Tensor, scores: Tensor, heads: int, scale: float) -> Tensor:
    """Return values (batch, height, width, channels), mixed by scores (batch, rows, columns, heads * 81)."""
    values, scores = values.contiguous(), scores.contiguous()
    mixed = torch.empty_like(values)
    sizes = _sizes(values, scores, heads)
    outlook_programs.gather[_grid(scores, heads)](
        values, scores, scores, mixed, *sizes, scale, backward=False, **_blocks(values, heads)
    )
    return mixed


@torch.library.custom_op("horovod_volo::outlook_fused_backward", mutates_args=())
def fused_outlook_backward(
    gradient: Tensor, values: Tensor, scores: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the values and of the scores."""
    gradient, values, scores = gradient.contiguous(), values.contiguous(), scores.contiguous()
    of_values, of_scores = torch.empty_like(values), torch.empty_like(scores)
    batch, rows, columns = scores.shape[:3]
    logarithms = scores.new_empty((batch, rows, columns, heads, 9), dtype=torch.float32)
    sizes, grid, blocks = _sizes(values, scores, heads), _grid(scores, heads), _blocks(values, heads)
    outlook_programs.differentiate_scores[grid](
        gradient, values, scores, of_scores, logarithms, *sizes, scale, **blocks
    )
    outlook_programs.gather[grid](
        gradient, scores, logarithms, of_values, *sizes, scale, backward=True, **blocks
    )
    return of_values, of_scores


def _sizes(values: Tensor, scores: Tensor, heads: int) -> tuple[int, ...]:
    batch, rows, columns = scores.shape[:3]
    return batch * rows * columns, heads, rows, columns, values.shape[1], values.shape[2]


def _grid(scores: Tensor, heads: int) -> tuple[int]:
    batch, rows, columns = scores.shape[:3]
    return (triton.cdiv(batch * rows * columns, _CELLS) * heads,)


def _blocks(values: Tensor, heads: int) -> dict[str, int]:
    width = values.shape[3] // heads
    return {"depth": width, "lanes": triton.next_power_of_2(width), "cells": _CELLS}


@fused_outlook.register_fake
def _form(values: Tensor, _scores: Tensor, _heads: int, _scale: float) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


@fused_outlook_backward.register_fake
def _backward_form(
    _: Tensor, values: Tensor, scores: Tensor, _heads: int, _scale: float
) -> tuple[Tensor, Tensor]:
    form = torch.contiguous_format
    return torch.empty_like(values, memory_format=form), torch.empty_like(scores, memory_format=form)


def _keep(ctx: Any, inputs: tuple[Any, ...], **_: Tensor) -> None:
    *both, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(*both)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    of_both = fused_outlook_backward(gradient, *ctx.saved_tensors, ctx.heads, ctx.scale)
    return *of_both, None, None


fused_outlook.register_autograd(_backward, setup_context=_keep)
