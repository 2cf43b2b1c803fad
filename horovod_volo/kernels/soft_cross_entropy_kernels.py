"""Cross-entropy of logits with sparse soft targets on NVIDIA GPUs, one Triton program per row.

The target of a row is `uniform` on every class plus `weights` on the classes `ids`, which may repeat. Forward
reads the logits once; backward reads them once and may overwrite them by their gradient. Arithmetic is fp32.

Invariant: the gradient is bitwise reproducible. If a class is repeated in `ids`, only the lane of its first
entry writes the class, with the sum over all its entries.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def loss_kernel(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    ids,
    weights,
    loss,
    lse,
    classes,
    entries,
    block_classes: tl.constexpr,
    block_entries: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * classes
    maximum = -float("inf")
    sum_exp = 0.0  # of exp(logit - maximum)
    logit_sum = 0.0
    for first in range(0, classes, block_classes):
        index = first + tl.arange(0, block_classes)
        x = tl.load(row_logits + index, mask=index < classes, other=-float("inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        sum_exp = sum_exp * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), axis=0)
        maximum = new_maximum
        logit_sum += tl.sum(tl.where(index < classes, x, 0.0), axis=0)
    row_lse = maximum + tl.log(sum_exp)

    weight_sum = 0.0
    weighted_logits = 0.0
    for first in range(0, entries, block_entries):
        index = first + tl.arange(0, block_entries)
        id = tl.load(ids + row * entries + index, mask=index < entries, other=0)
        weight = tl.load(weights + row * entries + index, mask=index < entries, other=0.0)
        weight_sum += tl.sum(weight, axis=0)
        weighted_logits += tl.sum(weight * tl.load(row_logits + id).to(tl.float32), axis=0)
    uniform_weight = tl.load(uniform + row)
    tl.store(lse + row, row_lse)
    target_sum = uniform_weight * classes + weight_sum
    tl.store(loss + row, target_sum * row_lse - uniform_weight * logit_sum - weighted_logits)


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    ids,
    weights,
    lse,
    grad_loss,
    grad,
    classes,
    entries,
    block_classes: tl.constexpr,
    block_entries: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits, row_grad = logits + row * classes, grad + row * classes
    row_ids, row_weights = ids + row * entries, weights + row * entries
    weight_sum = 0.0
    for first in range(0, entries, block_entries):
        index = first + tl.arange(0, block_entries)
        weight_sum += tl.sum(tl.load(row_weights + index, mask=index < entries, other=0.0), axis=0)
    scale, uniform_weight = tl.load(grad_loss + row), tl.load(uniform + row)
    target_sum, row_lse = uniform_weight * classes + weight_sum, tl.load(lse + row)
    for first in range(0, classes, block_classes):
        index = first + tl.arange(0, block_classes)
        x = tl.load(row_logits + index, mask=index < classes, other=0.0).to(tl.float32)
        value = scale * (target_sum * tl.exp(x - row_lse) - uniform_weight)
        tl.store(row_grad + index, value.to(row_grad.dtype.element_ty), mask=index < classes)
    # The loop below reads gradients that other threads of this program have written.
    tl.debug_barrier()
    for first in range(0, entries, block_entries):
        index = first + tl.arange(0, block_entries)
        id = tl.load(row_ids + index, mask=index < entries, other=-1)
        weight = tl.zeros([block_entries], tl.float32)  # sum over all entries of the class
        earlier = tl.zeros([block_entries], tl.int32)  # earlier entries of the same class
        for other_first in range(0, entries, block_entries):
            other_index = other_first + tl.arange(0, block_entries)
            other_id = tl.load(row_ids + other_index, mask=other_index < entries, other=-2)
            other_weight = tl.load(row_weights + other_index, mask=other_index < entries, other=0.0)
            same = id[:, None] == other_id[None, :]
            weight += tl.sum(tl.where(same, other_weight[None, :], 0.0), axis=1)
            earlier += tl.sum((same & (other_index[None, :] < index[:, None])).to(tl.int32), axis=1)
        writes = (index < entries) & (earlier == 0)
        value = tl.load(row_grad + id, mask=writes, other=0.0).to(tl.float32) - scale * weight
        tl.store(row_grad + id, value.to(row_grad.dtype.element_ty), mask=writes)
