"""Fused outlook attention on NVIDIA GPUs: 3 x 3 windows at stride 2, without unfolding them in memory.

Invariant: only the inputs and each softmax's sum are saved for backward, which recomputes the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horovod_volo.core.operators import register_kernel

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_CELLS, _WINDOWS, _ROWS = 32, 8, 128  # of one program


@torch.library.custom_op("horovod_volo::outlook_fused", mutates_args=())
def fused_outlook(values: Tensor, logits: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return outlook attention of values (batch, height, width, channels), and its softmaxes' sums.

    `logits` are the attention logits (batch, rows, columns, heads * 81) of windows, multiplied by `scale`.
    The sums are binary logarithms, (batch, rows, columns, heads * 9) in fp32.
    """
    from horovod_volo.kernels import outlook_kernels as kernels

    values, logits = values.contiguous(), logits.contiguous()
    output, log2_sums = outputs = _outputs(values, logits)
    count = log2_sums.numel()
    kernels.softmax_sums[(-(-count // _ROWS),)](
        logits, log2_sums, count, scale, rows=_ROWS, enable_fp_fusion=True
    )
    kernels.aggregate_windows[_grid(logits, heads, _CELLS)](
        values, logits, log2_sums, output, *_sizes(values, logits, heads), scale,
        backward=False, cells=_CELLS, **_options(values, heads),
    )  # fmt: skip
    return outputs


@torch.library.custom_op("horovod_volo::outlook_fused_backward", mutates_args=())
def fused_outlook_backward(
    gradient: Tensor, values: Tensor, logits: Tensor, log2_sums: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and logits."""
    from horovod_volo.kernels import outlook_kernels as kernels

    gradient, values, logits = gradient.contiguous(), values.contiguous(), logits.contiguous()
    grad_values, grad_logits = gradients = _gradients(values, logits)
    common = *_sizes(values, logits, heads), scale
    options = _options(values, heads)
    kernels.logits_backward[_grid(logits, heads, _WINDOWS)](
        gradient, values, logits, grad_logits, log2_sums, *common, windows=_WINDOWS, num_warps=2, **options
    )
    kernels.aggregate_windows[_grid(logits, heads, _CELLS)](
        gradient, logits, log2_sums, grad_values, *common, backward=True, cells=_CELLS, **options
    )
    return gradients


def _sizes(values: Tensor, logits: Tensor, heads: int) -> tuple[int, ...]:
    batch, rows, columns = logits.shape[:3]
    return batch * rows * columns, heads, rows, columns, values.shape[1], values.shape[2]


def _grid(logits: Tensor, heads: int, windows: int) -> tuple[int]:
    batch, rows, columns = logits.shape[:3]
    return (-(-batch * rows * columns // windows) * heads,)


def _options(values: Tensor, heads: int) -> dict[str, int]:
    head_dim = values.shape[3] // heads
    lanes = max(16, 1 << (head_dim - 1).bit_length())  # tensor cores need 16
    return {"head_dim": head_dim, "lanes": lanes, "enable_fp_fusion": True}  # Triton's default, until 3.10


def _outputs(values: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    sums = logits.new_empty((*logits.shape[:3], logits.shape[3] // 9), dtype=torch.float32)
    return torch.empty_like(values, memory_format=torch.contiguous_format), sums


def _gradients(values: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(values, memory_format=contiguous),
        torch.empty_like(logits, memory_format=contiguous),
    )


@fused_outlook.register_fake
def _fake(values: Tensor, logits: Tensor, _heads: int, _scale: float) -> tuple[Tensor, Tensor]:
    return _outputs(values, logits)


@fused_outlook_backward.register_fake
def _fake_backward(_gradient: Tensor, values: Tensor, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _gradients(values, logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
    gradients = fused_outlook_backward(gradient, *ctx.saved_tensors, ctx.heads, ctx.scale)
    return *gradients, None, None


fused_outlook.register_autograd(_backward, setup_context=_setup_context)
register_kernel("outlook attention", fused_outlook)
