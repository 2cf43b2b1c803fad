"""Class attention on NVIDIA GPUs: the class token's one query over keys and values of itself and all tokens.

Keys and values are read, and their gradients written, where the joint projection has them: nothing is
transposed, and the class token's are not joined to those of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_BLOCK = 32  # tokens that a program reads at a time


@torch.library.custom_op("horovod_volo::class_attention", mutates_args=())
def class_attention(
    query: Tensor, own: Tensor, others: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of each head, (batch, 1, channels), and the logarithm of its softmax's sum.

    query  (batch, 1, channels)
    own    (batch, 1, 2 x channels) keys and values of the class token
    others (batch, tokens, 2 x channels) those of the tokens
    """
    from horovod_volo.kernels import class_attention_kernels as kernels

    query, own, others = query.contiguous(), own.contiguous(), others.contiguous()
    result, log_sums = outputs = _outputs(query, heads)
    kernels.class_attention[(len(query), heads)](
        query, own, others, result, log_sums, *_sizes(query, others, heads), scale, **_blocks(query, heads)
    )
    return outputs


@torch.library.custom_op("horovod_volo::class_attention_backward", mutates_args=())
def class_attention_backward(
    gradient: Tensor,
    query: Tensor,
    own: Tensor,
    others: Tensor,
    result: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `query`, `own` and `others`."""
    from horovod_volo.kernels import class_attention_kernels as kernels

    inputs = tuple(tensor.contiguous() for tensor in (gradient, query, own, others))
    heads = log_sums.shape[1]
    gradients = _gradients(query, own, others)
    kernels.class_attention_backward[(len(query), heads)](
        *inputs, result, log_sums, *gradients, *_sizes(query, others, heads), scale, **_blocks(query, heads)
    )
    return gradients


def _sizes(query: Tensor, others: Tensor, heads: int) -> tuple[int, int, int]:
    return others.shape[1], heads, query.shape[2] // heads


def _blocks(query: Tensor, heads: int) -> dict[str, int]:
    return {"block": _BLOCK, "lanes": 1 << (query.shape[2] // heads - 1).bit_length()}


def _outputs(query: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    return result, query.new_empty((len(query), heads), dtype=torch.float32)


def _gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, own, others = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs
    )
    return query, own, others


@class_attention.register_fake
def _fake_class_attention(
    query: Tensor, _own: Tensor, _others: Tensor, heads: int, _scale: float
) -> tuple[Tensor, Tensor]:
    return _outputs(query, heads)


@class_attention_backward.register_fake
def _fake_class_attention_backward(
    _gradient: Tensor, query: Tensor, own: Tensor, others: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(query, own, others)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, own, others, _, ctx.attention_scale = inputs
    ctx.save_for_backward(query, own, others, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = class_attention_backward(gradient, *ctx.saved_tensors, ctx.attention_scale)
    return *gradients, None, None


class_attention.register_autograd(_backward, setup_context=_save_for_backward)
