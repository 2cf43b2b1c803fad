"""Triton kernels of a pre-norm residual branch: gather and LayerNorm, and residual addition.

A tile is some tokens with all their channels. Sums are in fp32. Every element is written once, without
atomics, so results are reproducible; the gradients of weight and bias are summed over programs afterwards.

`rows` is, for each image that the branch computes, its number in the batch; `position` is the inverse. -1
marks an image that is dropped.
"""

# `count` is not specialized: drop path changes it from step to step, and programs would be compiled again.
# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mapped(token, exists, length, images, mapped: tl.constexpr):
    """Return for each token its number on the other side of the mapping `images`, and whether it is there."""
    if not mapped:
        return token.to(tl.int64), exists
    image = tl.load(images + token // length, mask=exists, other=-1).to(tl.int64)
    return image * length + token % length, exists & (image >= 0)


@triton.jit
def _offsets(token, exists, channels, lanes: tl.constexpr):
    """Return the offsets of all channels of each token, (tile, lanes), and whether they exist."""
    lane = tl.arange(0, lanes)
    inside = exists[:, None] & (lane < channels)[None, :]
    return token.to(tl.int64)[:, None] * channels + lane[None, :], inside


@triton.jit(do_not_specialize=["count"])
def normalize(
    tokens, rows, weight, bias, normed, mean, rstd, count, length, channels, eps,
    mapped: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
):
    """Write the LayerNorm of the tokens of `rows`, their means and inverse deviations; 0 for dropped ones."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = token < count
    source, kept = _mapped(token, exists, length, rows, mapped)
    offsets, inside = _offsets(source, kept, channels, lanes)
    x = tl.load(tokens + offsets, mask=inside, other=0.0).to(tl.float32)
    token_mean = tl.sum(x, axis=1) / channels
    centred = tl.where(inside, x - token_mean[:, None], 0.0)
    token_rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / channels + eps)
    lane = tl.arange(0, lanes)
    scale = tl.load(weight + lane, mask=lane < channels, other=0.0).to(tl.float32)
    shift = tl.load(bias + lane, mask=lane < channels, other=0.0).to(tl.float32)
    y = tl.where(inside, centred * token_rstd[:, None] * scale[None, :] + shift[None, :], 0.0)
    offsets, inside = _offsets(token, exists, channels, lanes)
    tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=inside)
    tl.store(mean + token, token_mean, mask=exists)
    tl.store(rstd + token, token_rstd, mask=exists)


@triton.jit(do_not_specialize=["count"])
def normalize_backward(
    grad_skip, grad_normed, tokens, mean, rstd, position, weight, grad_tokens, grad_weight, grad_bias,
    count, length, channels,
    mapped: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr,
):
    """Write the sum of both gradients of the tokens, and this program's part of weight's and bias's."""
    lane = tl.arange(0, lanes)
    scale = tl.load(weight + lane, mask=lane < channels, other=0.0).to(tl.float32)
    of_weight = tl.zeros((lanes,), tl.float32)
    of_bias = tl.zeros((lanes,), tl.float32)
    for first in range(tl.program_id(0) * tile, count, programs * tile):
        token = first + tl.arange(0, tile)
        exists = token < count
        branch_token, kept = _mapped(token, exists, length, position, mapped)
        branch_offsets, computed = _offsets(branch_token, kept, channels, lanes)
        gradient = tl.load(grad_normed + branch_offsets, mask=computed, other=0.0).to(tl.float32)
        token_mean = tl.load(mean + branch_token, mask=kept, other=0.0)
        token_rstd = tl.load(rstd + branch_token, mask=kept, other=0.0)
        offsets, inside = _offsets(token, exists, channels, lanes)
        x = tl.load(tokens + offsets, mask=computed, other=0.0).to(tl.float32)
        standard = tl.where(computed, (x - token_mean[:, None]) * token_rstd[:, None], 0.0)
        of_weight += tl.sum(gradient * standard, axis=0)
        of_bias += tl.sum(gradient, axis=0)
        scaled = gradient * scale[None, :]
        mean_scaled = tl.sum(scaled, axis=1) / channels
        mean_product = tl.sum(scaled * standard, axis=1) / channels
        through = (scaled - mean_scaled[:, None] - standard * mean_product[:, None]) * token_rstd[:, None]
        skip = tl.load(grad_skip + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_tokens + offsets, (skip + through).to(grad_tokens.dtype.element_ty), mask=inside)
    partial = tl.program_id(0) * channels + lane
    tl.store(grad_weight + partial, of_weight, mask=lane < channels)
    tl.store(grad_bias + partial, of_bias, mask=lane < channels)


@triton.jit(do_not_specialize=["count"])
def add_branch(
    tokens, branch, position, result, count, length, channels, scale,
    mapped: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
):
    """Write tokens + scale * branch, where the branch was computed."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = token < count
    branch_token, kept = _mapped(token, exists, length, position, mapped)
    branch_offsets, computed = _offsets(branch_token, kept, channels, lanes)
    added = tl.load(branch + branch_offsets, mask=computed, other=0.0).to(tl.float32)
    offsets, inside = _offsets(token, exists, channels, lanes)
    x = tl.load(tokens + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + offsets, (x + scale * added).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def add_branch_backward(
    gradient, rows, grad_branch, count, length, channels, scale,
    mapped: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
):
    """Write scale * gradient for the tokens of the branch; 0 for dropped ones."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = token < count
    source, kept = _mapped(token, exists, length, rows, mapped)
    source_offsets, inside = _offsets(source, kept, channels, lanes)
    value = scale * tl.load(gradient + source_offsets, mask=inside, other=0.0).to(tl.float32)
    offsets, inside = _offsets(token, exists, channels, lanes)
    tl.store(grad_branch + offsets, value.to(grad_branch.dtype.element_ty), mask=inside)
