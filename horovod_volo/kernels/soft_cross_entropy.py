"""The cross-entropy of logits and sparse soft targets on an NVIDIA GPU: one program a row.

A row's target is `uniform` on every class plus `weights` on the classes `ids`, which may repeat. Logits are
read once forward, and once backward, where their gradient may take their place. Arithmetic is fp32.

Invariant: the gradient is the same bits each time. Only one lane writes to a class: that of the class's
first entry, which adds up all entries of its class.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_AT_ONCE = 4096  # classes: what the registers of eight warps hold
_ENTRIES_AT_ONCE = 64


def loss_with_lse(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss, and log sum exp of its logits, both (rows,) fp32."""
    rows = logits.shape[0]
    loss = torch.empty(rows, device=logits.device)
    lse = torch.empty_like(loss)
    target = (uniform.contiguous(), ids.contiguous(), weights.contiguous())
    _loss_of_row[(rows,)](logits, *target, loss, lse, logits.shape[1], ids.shape[1], **_blocks(logits))
    return loss, lse


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    uniform: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Fill contiguous `grad`, which may be the logits, with the gradient."""
    target = (uniform.contiguous(), ids.contiguous(), weights.contiguous())
    _gradient_of_row[(logits.shape[0],)](
        logits, *target, lse, grad_loss.contiguous(), grad, logits.shape[1], ids.shape[1], **_blocks(logits)
    )


def _blocks(logits: Tensor) -> dict[str, Any]:
    at_once = min(triton.next_power_of_2(logits.shape[1]), _MOST_AT_ONCE)
    return {
        "classes_at_once": at_once,
        "entries_at_once": _ENTRIES_AT_ONCE,
        "num_warps": 8 if at_once == _MOST_AT_ONCE else 4,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _loss_of_row(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    ids,
    weights,
    loss,
    lse,
    classes,
    entries,
    classes_at_once: tl.constexpr,
    entries_at_once: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = logits + row * classes
    highest = -float("inf")
    exponentials = 0.0  # their sum, each divided by e^highest
    total = 0.0
    for first in range(0, classes, classes_at_once):
        place = first + tl.arange(0, classes_at_once)
        x = tl.load(numbers + place, mask=place < classes, other=-float("inf")).to(tl.float32)
        now_highest = tl.maximum(highest, tl.max(x, axis=0))
        exponentials = exponentials * tl.exp(highest - now_highest) + tl.sum(tl.exp(x - now_highest), axis=0)
        highest = now_highest
        total += tl.sum(tl.where(place < classes, x, 0.0), axis=0)
    row_lse = highest + tl.log(exponentials)

    weight_sum = 0.0
    named = 0.0
    for first in range(0, entries, entries_at_once):
        place = first + tl.arange(0, entries_at_once)
        id = tl.load(ids + row * entries + place, mask=place < entries, other=0)
        weight = tl.load(weights + row * entries + place, mask=place < entries, other=0.0)
        weight_sum += tl.sum(weight, axis=0)
        named += tl.sum(weight * tl.load(numbers + id).to(tl.float32), axis=0)
    share = tl.load(uniform + row)
    tl.store(lse + row, row_lse)
    tl.store(loss + row, (share * classes + weight_sum) * row_lse - share * total - named)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_of_row(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    ids,
    weights,
    lse,
    grad_loss,
    grad,
    classes,
    entries,
    classes_at_once: tl.constexpr,
    entries_at_once: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers, out = logits + row * classes, grad + row * classes
    row_ids, row_weights = ids + row * entries, weights + row * entries
    weight_sum = 0.0
    for first in range(0, entries, entries_at_once):
        place = first + tl.arange(0, entries_at_once)
        weight_sum += tl.sum(tl.load(row_weights + place, mask=place < entries, other=0.0), axis=0)
    scale, share = tl.load(grad_loss + row), tl.load(uniform + row)
    mass, row_lse = share * classes + weight_sum, tl.load(lse + row)
    for first in range(0, classes, classes_at_once):
        place = first + tl.arange(0, classes_at_once)
        x = tl.load(numbers + place, mask=place < classes, other=0.0).to(tl.float32)
        value = scale * (mass * tl.exp(x - row_lse) - share)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=place < classes)
    # Other threads of this program wrote the numbers that an entry's thread now reads.
    tl.debug_barrier()
    for first in range(0, entries, entries_at_once):
        place = first + tl.arange(0, entries_at_once)
        id = tl.load(row_ids + place, mask=place < entries, other=-1)
        weight = tl.zeros([entries_at_once], tl.float32)  # of all entries of the class
        earlier = tl.zeros([entries_at_once], tl.int32)  # entries of the class
        for other_first in range(0, entries, entries_at_once):
            other_place = other_first + tl.arange(0, entries_at_once)
            other_id = tl.load(row_ids + other_place, mask=other_place < entries, other=-2)
            other_weight = tl.load(row_weights + other_place, mask=other_place < entries, other=0.0)
            same = id[:, None] == other_id[None, :]
            weight += tl.sum(tl.where(same, other_weight[None, :], 0.0), axis=1)
            earlier += tl.sum((same & (other_place[None, :] < place[:, None])).to(tl.int32), axis=1)
        writes = (place < entries) & (earlier == 0)
        value = tl.load(out + id, mask=writes, other=0.0).to(tl.float32) - scale * weight
        tl.store(out + id, value.to(out.dtype.element_ty), mask=writes)
