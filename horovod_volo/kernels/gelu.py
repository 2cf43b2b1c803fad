"""GELU and the linear layer after it on NVIDIA GPUs, as in the MLP of a block.

Invariant: only the input of GELU is saved for backward, which recomputes its output in the kernel that also
writes its gradient and sums that of the bias before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_TILE, _LANES = 16, 128  # rows and columns that a program works on at a time
_PROGRAMS = 64  # for each block of columns


def gelu_linear(hidden: Tensor, hidden_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return F.linear(F.gelu(hidden), weight, bias) in the dtype of `hidden`.

    `hidden_bias` was added to `hidden` without a gradient, which is computed here. `bias` gets none: it is
    computed where the gradient of the result is written.
    """
    result: Tensor = _GeluLinear.apply(  # type: ignore[no-untyped-call]
        hidden, hidden_bias, weight.to(hidden.dtype), bias.detach().to(hidden.dtype)
    )
    return result


class _GeluLinear(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, hidden_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(hidden, weight)
        return F.linear(F.gelu(hidden), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_output = gradient.flatten(0, -2)  # (tokens, channels)
        grad_hidden, activated, parts = gelu_backward(of_output @ weight, hidden)
        return grad_hidden, parts.sum(0), of_output.mT @ activated.flatten(0, -2), None


@torch.library.custom_op("horovod_volo::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `hidden`, GELU of `hidden`, and programs' parts of the gradient's sum."""
    from horovod_volo.kernels import gelu_kernels as kernels

    grad_hidden, activated, parts = outputs = _outputs(hidden)
    columns = hidden.shape[-1]
    kernels.gelu_backward[(_PROGRAMS, -(-columns // _LANES))](
        gradient.contiguous(), hidden.contiguous(), grad_hidden, activated, parts,
        hidden.numel() // columns, columns, tile=_TILE, lanes=_LANES, programs=_PROGRAMS,
    )  # fmt: skip
    return outputs


def _outputs(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    parts = hidden.new_empty((_PROGRAMS, hidden.shape[-1]), dtype=torch.float32)
    return grad_hidden, torch.empty_like(grad_hidden), parts


@gelu_backward.register_fake
def _fake_gelu_backward(_gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(hidden)
