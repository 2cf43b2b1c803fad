"""Fused outlook attention on NVIDIA GPUs: 3 x 3 windows at stride 2, without unfolding them in memory.

Invariant: only the inputs are saved for backward; it recomputes the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Triton is imported where a kernel is launched: shapes and costs are known without it.
# Cells of one program: fewer than the threads of its four warps, so that each thread loads its cell's logits.
_CELLS = 32


@torch.library.custom_op("horovod_volo::outlook_fused", mutates_args=())
def fused_outlook(values: Tensor, logits: Tensor, heads: int, scale: float) -> Tensor:
    """Return outlook attention of values (batch, height, width, channels).

    `logits` are the attention logits (batch, rows, columns, heads * 81) of windows, multiplied by `scale`.
    """
    from horovod_volo.kernels import outlook_kernels

    values, logits = values.contiguous(), logits.contiguous()
    output = torch.empty_like(values)
    sizes = _sizes(values, logits, heads)
    outlook_kernels.aggregate_windows[_grid(logits, heads)](
        values, logits, logits, output, *sizes, scale, backward=False, **_blocks(values, heads)
    )
    return output


@torch.library.custom_op("horovod_volo::outlook_fused_backward", mutates_args=())
def fused_outlook_backward(
    gradient: Tensor, values: Tensor, logits: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and logits."""
    from horovod_volo.kernels import outlook_kernels

    gradient, values, logits = gradient.contiguous(), values.contiguous(), logits.contiguous()
    grad_values, grad_logits = torch.empty_like(values), torch.empty_like(logits)
    batch, rows, columns = logits.shape[:3]
    log_sum_exp = logits.new_empty((batch, rows, columns, heads, 9), dtype=torch.float32)
    sizes, grid, blocks = _sizes(values, logits, heads), _grid(logits, heads), _blocks(values, heads)
    outlook_kernels.logits_backward[grid](
        gradient, values, logits, grad_logits, log_sum_exp, *sizes, scale, **blocks
    )
    outlook_kernels.aggregate_windows[grid](
        gradient, logits, log_sum_exp, grad_values, *sizes, scale, backward=True, **blocks
    )
    return grad_values, grad_logits


def _sizes(values: Tensor, logits: Tensor, heads: int) -> tuple[int, ...]:
    batch, rows, columns = logits.shape[:3]
    return batch * rows * columns, heads, rows, columns, values.shape[1], values.shape[2]


def _grid(logits: Tensor, heads: int) -> tuple[int]:
    batch, rows, columns = logits.shape[:3]
    return (-(-batch * rows * columns // _CELLS) * heads,)


def _blocks(values: Tensor, heads: int) -> dict[str, int]:
    head_dim = values.shape[3] // heads
    return {"head_dim": head_dim, "lanes": 1 << (head_dim - 1).bit_length(), "cells": _CELLS}


@fused_outlook.register_fake
def _fake(values: Tensor, _logits: Tensor, _heads: int, _scale: float) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


@fused_outlook_backward.register_fake
def _fake_backward(
    _: Tensor, values: Tensor, logits: Tensor, _heads: int, _scale: float
) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(values, memory_format=contiguous),
        torch.empty_like(logits, memory_format=contiguous),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], **_: Tensor) -> None:
    *tensors, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    gradients = fused_outlook_backward(gradient, *ctx.saved_tensors, ctx.heads, ctx.scale)
    return *gradients, None, None


fused_outlook.register_autograd(_backward, setup_context=_setup_context)
