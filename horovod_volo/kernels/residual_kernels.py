"""Triton kernels of pre-norm residual branches: gather and LayerNorm, residual addition, and both at once.

A tile is some tokens with all their channels. Sums are in fp32. Every element is written once, without
atomics, so results are reproducible; the gradients of weight and bias are summed over programs afterwards.

`rows` is, for each image that the branch computes, its number in the batch; `position` is the inverse. -1
marks an image that is dropped. `mapping` says whether a branch computes all images, all with some masked, or
some by index.
"""

# `count` is not specialized: drop path changes it from step to step, and programs would be compiled again.
# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from horovod_volo.kernels.codes import RowMapping

ALL = tl.constexpr(int(RowMapping.ALL))
MASKED = tl.constexpr(int(RowMapping.MASKED))


@triton.jit
def _mapped(token, exists, length, images, mapped: tl.constexpr):
    """Return for each token its number on the other side of the mapping `images`, and whether it is there."""
    if not mapped:
        return token.to(tl.int64), exists
    image = tl.load(images + token // length, mask=exists, other=-1).to(tl.int64)
    return image * length + token % length, exists & (image >= 0)


@triton.jit
def _in_branch(token, exists, length, position, mapping: tl.constexpr):
    """Return where a branch has each token of the batch, whether it has it, and whether it is kept."""
    if mapping == ALL:
        return token.to(tl.int64), exists, exists
    image = tl.load(position + token // length, mask=exists, other=-1).to(tl.int64)
    kept = exists & (image >= 0)
    if mapping == MASKED:
        return token.to(tl.int64), exists, kept
    return image * length + token % length, kept, kept


@triton.jit
def _vector(vector, channels, lanes: tl.constexpr):
    lane = tl.arange(0, lanes)
    return tl.load(vector + lane, mask=lane < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _standardized(x, inside, channels, eps):
    """Return tokens with mean 0 and deviation 1, their means and inverse deviations."""
    mean = tl.sum(x, axis=1) / channels
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / channels + eps)
    return centred * rstd[:, None], mean, rstd


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
    standard, token_mean, token_rstd = _standardized(x, inside, channels, eps)
    y = standard * _vector(weight, channels, lanes) + _vector(bias, channels, lanes)
    y = tl.where(inside, y, 0.0)
    offsets, inside = _offsets(token, exists, channels, lanes)
    tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=inside)
    tl.store(mean + token, token_mean, mask=exists)
    tl.store(rstd + token, token_rstd, mask=exists)


@triton.jit(do_not_specialize=["count"])
def add_normalize(
    tokens, branch, position, result, next_position, weight, bias, normed, mean, rstd,
    count, length, channels, scale, eps,
    mapping: tl.constexpr, next_mapping: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
):
    """Write tokens + scale * branch, and their LayerNorm for the next branch; 0 for those it drops."""
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = token < count
    place, _, kept = _in_branch(token, exists, length, position, mapping)
    offsets, computed = _offsets(place, kept, channels, lanes)
    added = tl.load(branch + offsets, mask=computed, other=0.0).to(tl.float32)
    offsets, inside = _offsets(token, exists, channels, lanes)
    x = tl.load(tokens + offsets, mask=inside, other=0.0).to(tl.float32) + scale * added
    x = x.to(result.dtype.element_ty)
    tl.store(result + offsets, x, mask=inside)
    standard, token_mean, token_rstd = _standardized(x.to(tl.float32), inside, channels, eps)
    y = standard * _vector(weight, channels, lanes) + _vector(bias, channels, lanes)
    place, written, kept = _in_branch(token, exists, length, next_position, next_mapping)
    offsets, inside = _offsets(place, written, channels, lanes)
    tl.store(normed + offsets, tl.where(kept[:, None], y, 0.0).to(normed.dtype.element_ty), mask=inside)
    tl.store(mean + place, token_mean, mask=written)
    tl.store(rstd + place, token_rstd, mask=written)


@triton.jit(do_not_specialize=["count"])
def normalize_backward(
    grad_skip, grad_normed, tokens, mean, rstd, position, weight, branch_position, grad_tokens, grad_branch,
    parts, count, length, channels, scale,
    mapping: tl.constexpr, branched: tl.constexpr, branch_mapping: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr,
):
    """Write the sum of both gradients of the tokens, and this program's part of weight's and bias's.

    If a branch was added to the tokens, also write its gradient and the part of its bias's. `parts` is
    (programs, 2 or 3, channels).
    """
    lane = tl.arange(0, lanes)
    zeros = tl.zeros((lanes,), tl.float32)
    of_weight, of_bias, of_branch_bias = zeros, zeros, zeros
    for first in range(tl.program_id(0) * tile, count, programs * tile):
        token = first + tl.arange(0, tile)
        exists = token < count
        place, _, kept = _in_branch(token, exists, length, position, mapping)
        branch_offsets, computed = _offsets(place, kept, channels, lanes)
        gradient = tl.load(grad_normed + branch_offsets, mask=computed, other=0.0).to(tl.float32)
        token_mean = tl.load(mean + place, mask=kept, other=0.0)
        token_rstd = tl.load(rstd + place, mask=kept, other=0.0)
        offsets, inside = _offsets(token, exists, channels, lanes)
        x = tl.load(tokens + offsets, mask=computed, other=0.0).to(tl.float32)
        standard = tl.where(computed, (x - token_mean[:, None]) * token_rstd[:, None], 0.0)
        of_weight += tl.sum(gradient * standard, axis=0)
        of_bias += tl.sum(gradient, axis=0)
        scaled = gradient * _vector(weight, channels, lanes)
        mean_scaled = tl.sum(scaled, axis=1) / channels
        mean_product = tl.sum(scaled * standard, axis=1) / channels
        through = (scaled - mean_scaled[:, None] - standard * mean_product[:, None]) * token_rstd[:, None]
        if grad_skip is not None:
            through += tl.load(grad_skip + offsets, mask=inside, other=0.0).to(tl.float32)
        whole = through.to(grad_tokens.dtype.element_ty)
        tl.store(grad_tokens + offsets, whole, mask=inside)
        if branched:
            place, written, kept = _in_branch(token, exists, length, branch_position, branch_mapping)
            branch_gradient = tl.where(kept[:, None], scale * whole.to(tl.float32), 0.0)
            branch_gradient = branch_gradient.to(grad_branch.dtype.element_ty)
            offsets, inside = _offsets(place, written, channels, lanes)
            tl.store(grad_branch + offsets, branch_gradient, mask=inside)
            of_branch_bias += tl.sum(tl.where(inside, branch_gradient.to(tl.float32), 0.0), axis=0)
    part = parts + tl.program_id(0) * (3 if branched else 2) * channels + lane
    tl.store(part, of_weight, mask=lane < channels)
    tl.store(part + channels, of_bias, mask=lane < channels)
    if branched:
        tl.store(part + 2 * channels, of_branch_bias, mask=lane < channels)


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
