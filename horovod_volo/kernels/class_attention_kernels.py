"""Triton kernels of class attention; a program computes one head of one image.

Keys and values (batch, tokens, 2, heads, width) are read once in each direction. Arithmetic is in fp32, every
element is written once, without atomics, so results are reproducible.
"""

# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(image, head, first, count, heads, width, block: tl.constexpr, lanes: tl.constexpr):
    """Return the offsets of a head's keys of some tokens, (block, lanes), and which exist."""
    token, lane = first + tl.arange(0, block), tl.arange(0, lanes)
    row = image.to(tl.int64) * count + token
    inside = (token < count)[:, None] & (lane < width)[None, :]
    return row[:, None] * (2 * heads * width) + head * width + lane[None, :], inside


@triton.jit
def class_attention(
    query, own, others, result, log_sums, count, heads, width, scale,
    block: tl.constexpr, lanes: tl.constexpr,
):
    """Write the mean of a head's values, weighted by the softmax of the query's products with the keys."""
    image, head = tl.program_id(0), tl.program_id(1)
    channels, lane = heads * width, tl.arange(0, lanes)
    exists = lane < width
    at = image.to(tl.int64) * channels + head * width + lane
    q = tl.load(query + at, mask=exists, other=0.0).to(tl.float32) * scale
    own_at = image.to(tl.int64) * 2 * channels + head * width + lane
    highest = tl.sum(q * tl.load(own + own_at, mask=exists, other=0.0).to(tl.float32), axis=0)
    total = highest * 0.0 + 1.0
    weighted = tl.load(own + channels + own_at, mask=exists, other=0.0).to(tl.float32)
    for first in range(0, count, block):
        offsets, inside = _keys(image, head, first, count, heads, width, block, lanes)
        keys = tl.load(others + offsets, mask=inside, other=0.0).to(tl.float32)
        logits = tl.sum(keys * q[None, :], axis=1)
        logits = tl.where(first + tl.arange(0, block) < count, logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, axis=0))
        weights, shrunk = tl.exp(logits - new), tl.exp(highest - new)
        values = tl.load(others + channels + offsets, mask=inside, other=0.0).to(tl.float32)
        total = total * shrunk + tl.sum(weights, axis=0)
        weighted = weighted * shrunk + tl.sum(weights[:, None] * values, axis=0)
        highest = new
    tl.store(result + at, (weighted / total).to(result.dtype.element_ty), mask=exists)
    tl.store(log_sums + image * heads + head, highest + tl.log(total))


@triton.jit
def class_attention_backward(
    gradient, query, own, others, result, log_sums, grad_query, grad_own, grad_others,
    count, heads, width, scale,
    block: tl.constexpr, lanes: tl.constexpr,
):
    """Write the gradients of one head's query, keys and values; the softmax is recomputed."""
    image, head = tl.program_id(0), tl.program_id(1)
    channels, lane = heads * width, tl.arange(0, lanes)
    exists = lane < width
    at = image.to(tl.int64) * channels + head * width + lane
    q = tl.load(query + at, mask=exists, other=0.0).to(tl.float32) * scale
    incoming = tl.load(gradient + at, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(incoming * tl.load(result + at, mask=exists, other=0.0).to(tl.float32), axis=0)
    log_sum = tl.load(log_sums + image * heads + head)
    own_at = image.to(tl.int64) * 2 * channels + head * width + lane
    key = tl.load(own + own_at, mask=exists, other=0.0).to(tl.float32)
    value = tl.load(own + channels + own_at, mask=exists, other=0.0).to(tl.float32)
    weight = tl.exp(tl.sum(q * key, axis=0) - log_sum)
    of_logit = weight * (tl.sum(incoming * value, axis=0) - mean)
    kind = grad_own.dtype.element_ty
    tl.store(grad_own + own_at, (of_logit * q).to(kind), mask=exists)
    tl.store(grad_own + channels + own_at, (weight * incoming).to(kind), mask=exists)
    of_query = of_logit * key
    for first in range(0, count, block):
        offsets, inside = _keys(image, head, first, count, heads, width, block, lanes)
        keys = tl.load(others + offsets, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(others + channels + offsets, mask=inside, other=0.0).to(tl.float32)
        logits = tl.sum(keys * q[None, :], axis=1)
        weights = tl.where(first + tl.arange(0, block) < count, tl.exp(logits - log_sum), 0.0)
        of_logits = weights * (tl.sum(values * incoming[None, :], axis=1) - mean)
        tl.store(grad_others + offsets, (of_logits[:, None] * q[None, :]).to(kind), mask=inside)
        of_values = weights[:, None] * incoming[None, :]
        tl.store(grad_others + channels + offsets, of_values.to(kind), mask=inside)
        of_query += tl.sum(of_logits[:, None] * keys, axis=0)
    tl.store(grad_query + at, (scale * of_query).to(grad_query.dtype.element_ty), mask=exists)
