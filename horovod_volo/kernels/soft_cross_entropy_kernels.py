"""Cross-entropy of logits with sparse soft targets on NVIDIA GPUs, one Triton program per row.

The target of a row is `uniform` on every class plus `weights` on the classes `ids`, which may repeat. Forward
reads the logits once; backward reads them once and may overwrite them by their gradient. Arithmetic is fp32.

Entries of one class are merged in one of two ways. Few entries are compared with each other, and the lane of
a class's first entry writes the class, with the sum over all its entries. Many are first added to a table
with one integer for each class, in units of 1 / UNIT.

Invariant: the gradient is bitwise reproducible. Sums of integers do not depend on their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The sum of a class's weights may be up to 8e6 and is exact to 1e-12, less than fp32's rounding of 1e-5.
UNIT = tl.constexpr(2.0**40)


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
def table_kernel(ids, weights, table, classes, entries, block_entries: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the weights of one block of a row's entries to the row of the table."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block_entries + tl.arange(0, block_entries)
    id = tl.load(ids + row * entries + index, mask=index < entries, other=0)
    weight = tl.load(weights + row * entries + index, mask=index < entries, other=0.0)
    units = (weight * UNIT).to(tl.int64)
    tl.atomic_add(table + row * classes + id, units, mask=index < entries, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    ids,
    weights,
    lse,
    grad_loss,
    grad,
    table,
    classes,
    entries,
    tabled: tl.constexpr,
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
        value = target_sum * tl.exp(x - row_lse) - uniform_weight
        if tabled:
            units = tl.load(table + row * classes + index, mask=index < classes, other=0)
            value -= units.to(tl.float32) / UNIT
        tl.store(row_grad + index, (scale * value).to(row_grad.dtype.element_ty), mask=index < classes)
    if not tabled:
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
