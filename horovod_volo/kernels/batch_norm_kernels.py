"""Triton kernels of BatchNorm in training and the ReLU after it, on channels-last images.

Images are (rows, channels): a row is a pixel. A program reads tiles of rows with all their channels.
Arithmetic is in fp32. Sums are written for each program and added afterwards, without atomics, so results are
reproducible.
"""

# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(first, count, channels, tile: tl.constexpr, lanes: tl.constexpr):
    """Return the offsets of a tile of rows, (tile, lanes), and whether they exist."""
    row, lane = first + tl.arange(0, tile), tl.arange(0, lanes)
    inside = (row < count)[:, None] & (lane < channels)[None, :]
    return row.to(tl.int64)[:, None] * channels + lane[None, :], inside


@triton.jit
def _vector(vector, channels, lanes: tl.constexpr):
    lane = tl.arange(0, lanes)
    return tl.load(vector + lane, mask=lane < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _through_relu(gradient, x, mean, rstd, weight, bias, offsets, inside, channels, lanes: tl.constexpr):
    """Return the gradient where ReLU passes it, and the standardized images."""
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    standard = (value - _vector(mean, channels, lanes)) * _vector(rstd, channels, lanes)
    normed = standard * _vector(weight, channels, lanes) + _vector(bias, channels, lanes)
    return tl.where(normed <= 0, 0.0, incoming), standard


@triton.jit
def statistics(
    x, parts, count, channels, tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr
):
    """Write the count, the mean and the sum of squared deviations of this program's rows.

    `parts` is (programs, 3, channels). Tiles are combined by Chan's formulas, which do not cancel.
    """
    seen = 0.0
    mean, squares = tl.zeros((lanes,), tl.float32), tl.zeros((lanes,), tl.float32)
    for first in range(tl.program_id(0) * tile, count, programs * tile):
        offsets, inside = _rows(first, count, channels, tile, lanes)
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        new = tl.minimum(tile, count - first).to(tl.float32)
        tile_mean = tl.sum(value, axis=0) / new
        centred = tl.where(inside, value - tile_mean[None, :], 0.0)
        beyond = tile_mean - mean
        share = new / (seen + new)
        mean += beyond * share
        squares += tl.sum(centred * centred, axis=0) + beyond * beyond * (seen * share)
        seen += new
    lane = tl.arange(0, lanes)
    part = parts + tl.program_id(0) * 3 * channels + lane
    tl.store(part, tl.zeros((lanes,), tl.float32) + seen, mask=lane < channels)
    tl.store(part + channels, mean, mask=lane < channels)
    tl.store(part + 2 * channels, squares, mask=lane < channels)


@triton.jit
def combine(
    parts, mean, rstd, running_mean, running_var, count, channels, momentum, eps,
    tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr,
):
    """Combine the parts of all programs; write mean and 1 / deviation and update the running statistics."""
    lane = tl.program_id(0) * lanes + tl.arange(0, lanes)
    exists = lane < channels
    total = tl.zeros((lanes,), tl.float32)
    for first in range(0, programs, tile):
        program = first + tl.arange(0, tile)
        inside = (program < programs)[:, None] & exists[None, :]
        part = parts + program[:, None] * 3 * channels + lane[None, :]
        seen = tl.load(part, mask=inside, other=0.0)
        total += tl.sum(seen * tl.load(part + channels, mask=inside, other=0.0), axis=0)
    average = total / count
    squares = tl.zeros((lanes,), tl.float32)
    for first in range(0, programs, tile):
        program = first + tl.arange(0, tile)
        inside = (program < programs)[:, None] & exists[None, :]
        part = parts + program[:, None] * 3 * channels + lane[None, :]
        beyond = tl.load(part + channels, mask=inside, other=0.0) - average[None, :]
        within = tl.load(part + 2 * channels, mask=inside, other=0.0)
        squares += tl.sum(within + tl.load(part, mask=inside, other=0.0) * beyond * beyond, axis=0)
    tl.store(mean + lane, average, mask=exists)
    tl.store(rstd + lane, 1.0 / tl.sqrt(squares / count + eps), mask=exists)
    before = tl.load(running_mean + lane, mask=exists, other=0.0)
    tl.store(running_mean + lane, (1 - momentum) * before + momentum * average, mask=exists)
    before = tl.load(running_var + lane, mask=exists, other=0.0)
    unbiased = squares / tl.maximum(count - 1, 1)
    tl.store(running_var + lane, (1 - momentum) * before + momentum * unbiased, mask=exists)


@triton.jit
def normalize_relu(
    x, mean, rstd, weight, bias, result, count, channels, tile: tl.constexpr, lanes: tl.constexpr
):
    """Write the normalized images, and 0 where they are negative."""
    offsets, inside = _rows(tl.program_id(0) * tile, count, channels, tile, lanes)
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    standard = (value - _vector(mean, channels, lanes)) * _vector(rstd, channels, lanes)
    normed = standard * _vector(weight, channels, lanes) + _vector(bias, channels, lanes)
    # Not a maximum, which would hide NaN.
    tl.store(result + offsets, tl.where(normed < 0, 0.0, normed).to(result.dtype.element_ty), mask=inside)


@triton.jit
def gradient_sums(
    gradient, x, mean, rstd, weight, bias, parts, count, channels,
    tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr,
):
    """Write this program's part of the gradients of bias and weight, (programs, 2, channels)."""
    of_bias, of_weight = tl.zeros((lanes,), tl.float32), tl.zeros((lanes,), tl.float32)
    for first in range(tl.program_id(0) * tile, count, programs * tile):
        offsets, inside = _rows(first, count, channels, tile, lanes)
        passed, standard = _through_relu(
            gradient, x, mean, rstd, weight, bias, offsets, inside, channels, lanes
        )
        of_bias += tl.sum(passed, axis=0)
        of_weight += tl.sum(passed * standard, axis=0)
    lane = tl.arange(0, lanes)
    part = parts + tl.program_id(0) * 2 * channels + lane
    tl.store(part, of_bias, mask=lane < channels)
    tl.store(part + channels, of_weight, mask=lane < channels)


@triton.jit
def gradient_of_images(
    gradient, x, mean, rstd, weight, bias, sums, grad_x, count, channels,
    tile: tl.constexpr, lanes: tl.constexpr,
):
    """Write the gradient of the images; `sums` are the gradients of bias and weight, (2, channels)."""
    offsets, inside = _rows(tl.program_id(0) * tile, count, channels, tile, lanes)
    passed, standard = _through_relu(gradient, x, mean, rstd, weight, bias, offsets, inside, channels, lanes)
    of_bias, of_weight = _vector(sums, channels, lanes), _vector(sums + channels, channels, lanes)
    centred = passed - (of_bias + standard * of_weight) / count
    result = centred * _vector(rstd, channels, lanes) * _vector(weight, channels, lanes)
    tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)
