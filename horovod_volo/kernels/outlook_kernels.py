"""Triton kernels of the fused outlook attention; each program computes some cells of one head.

A cell is the 2 x 2 pixels from a window's centre to the right and down; four windows overlap it. A window
has 9 targets (its pixels in the output), each with a softmax over 9 sources (its pixels in the input). Every
element of the output is written once: no atomics, so results are reproducible. All sums are in fp32.

Invariant: cells and lanes (channels of a head) are the only axes of a tile, so that a sum over the pixels of
a window needs no exchange between threads.
"""

# `count` is not specialized: where it changes from step to step, programs would be compiled again.
# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cells_and_head(heads, cells: tl.constexpr):
    """Return this program's cells and head; heads vary first, as they are adjacent in memory."""
    program = tl.program_id(0)
    return program // heads * cells + tl.arange(0, cells), program % heads


@triton.jit
def _window(cell, down, right, count, rows, columns):
    """Return the windows at an offset from the cells, whether they exist, and y and x of their centres."""
    row = cell // columns % rows + down
    column = cell % columns + right
    exists = (cell < count) & (row < rows) & (column < columns)
    return cell + down * columns + right, exists, 2 * row, 2 * column


@triton.jit
def _pixel_offsets(
    image, y, x, exists, head, heads, height, width, head_dim: tl.constexpr, lanes: tl.constexpr
):
    """Return the offsets of one pixel per cell, (cells, lanes), and whether it is in the image."""
    lane = tl.arange(0, lanes)
    inside = exists & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    first = (((image * height + y) * width + x) * heads + head).to(tl.int64) * head_dim
    return first[:, None] + lane, inside[:, None] & (lane < head_dim)


@triton.jit
def _load_pixel(
    pixels, image, y, x, exists, head, heads, height, width, head_dim: tl.constexpr, lanes: tl.constexpr
):
    """Load one pixel per cell; zeros outside the image."""
    offsets, inside = _pixel_offsets(image, y, x, exists, head, heads, height, width, head_dim, lanes)
    return tl.load(pixels + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_logit(logits, window, target, source, exists, head, heads, scale):
    """Load the scaled logit of one target and source per window."""
    offset = (window * heads + head).to(tl.int64) * 81 + target * 9 + source
    return tl.load(logits + offset, mask=exists, other=0.0).to(tl.float32) * scale


@triton.jit
def _max_logit(logits, window, target, exists, head, heads, scale):
    """Return the maximum logit of a target over its sources."""
    maximum = _load_logit(logits, window, target, 0, exists, head, heads, scale)
    for source in tl.static_range(1, 9):
        logit = _load_logit(logits, window, target, source, exists, head, heads, scale)
        maximum = tl.maximum(maximum, logit)
    return maximum


@triton.jit
def _attention_of_target(
    values, logits, window, target, exists, y, x, image, head, heads, height, width, scale,
    head_dim: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Return the attention output of each window for one target, and its softmax's maximum and sum."""
    maximum = _max_logit(logits, window, target, exists, head, heads, scale)
    total = tl.zeros((cells,), tl.float32)
    output = tl.zeros((cells, lanes), tl.float32)
    for source in tl.static_range(9):
        power = tl.exp(_load_logit(logits, window, target, source, exists, head, heads, scale) - maximum)
        total += power
        output += power[:, None] * _load_pixel(
            values, image, y + source // 3 - 1, x + source % 3 - 1, exists,
            head, heads, height, width, head_dim, lanes,
        )
    return output / total[:, None], maximum, total


@triton.jit
def _gradient_of_source(
    gradient, logits, log_sum_exp, window, source, exists, y, x, image, head, heads, height, width, scale,
    head_dim: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Return the gradient of one source's values in each window."""
    grad_value = tl.zeros((cells, lanes), tl.float32)
    for target in tl.static_range(9):
        offset = (window * heads + head) * 9 + target
        lse = tl.load(log_sum_exp + offset, mask=exists, other=0.0)
        weight = tl.exp(_load_logit(logits, window, target, source, exists, head, heads, scale) - lse)
        grad_value += weight[:, None] * _load_pixel(
            gradient, image, y + target // 3 - 1, x + target % 3 - 1, exists,
            head, heads, height, width, head_dim, lanes,
        )
    return grad_value


@triton.jit(do_not_specialize=["count"])
def aggregate_windows(
    pixels, logits, log_sum_exp, output, count, heads, rows, columns, height, width, scale,
    backward: tl.constexpr, head_dim: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Sum over the windows that overlap each pixel: attention outputs, or in backward gradients of values.

    `pixels` are the values, or in backward the gradient of the attention's output.
    """
    cell, head = _cells_and_head(heads, cells)
    image = cell // (rows * columns)
    _, in_image, top, left = _window(cell, 0, 0, count, rows, columns)
    for corner in tl.static_range(4):
        total = tl.zeros((cells, lanes), tl.float32)
        for offset in tl.static_range(4):
            # The cell's own window contains all its pixels, the window to the right those on the right, etc.
            if offset // 2 <= corner // 2 and offset % 2 <= corner % 2:
                position = 4 + 3 * (corner // 2) + corner % 2 - 6 * (offset // 2) - 2 * (offset % 2)
                window, exists, y, x = _window(cell, offset // 2, offset % 2, count, rows, columns)
                if backward:
                    total += _gradient_of_source(
                        pixels, logits, log_sum_exp, window, position, exists, y, x, image,
                        head, heads, height, width, scale, head_dim, lanes, cells,
                    )
                else:
                    attention, _maximum, _total = _attention_of_target(
                        pixels, logits, window, position, exists, y, x, image,
                        head, heads, height, width, scale, head_dim, lanes, cells,
                    )
                    total += attention
        y, x = top + corner // 2, left + corner % 2
        offsets, inside = _pixel_offsets(image, y, x, in_image, head, heads, height, width, head_dim, lanes)
        tl.store(output + offsets, total.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def logits_backward(
    gradient, values, logits, grad_logits, log_sum_exp, count, heads, rows, columns, height, width, scale,
    head_dim: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Write the gradient of each window's logits, and the log-sum-exp of each of its softmaxes."""
    cell, head = _cells_and_head(heads, cells)
    image = cell // (rows * columns)
    window, exists, y, x = _window(cell, 0, 0, count, rows, columns)
    for target in range(9):
        grad_output = _load_pixel(
            gradient, image, y + target // 3 - 1, x + target % 3 - 1, exists,
            head, heads, height, width, head_dim, lanes,
        )
        attention, maximum, total = _attention_of_target(
            values, logits, window, target, exists, y, x, image,
            head, heads, height, width, scale, head_dim, lanes, cells,
        )
        lse = maximum + tl.log(total)
        tl.store(log_sum_exp + (window * heads + head) * 9 + target, lse, mask=exists)
        # The softmax's backward: weight * (grad_weight - sum of weights * grad_weights).
        average = tl.sum(attention * grad_output, axis=1)
        for source in tl.static_range(9):
            value = _load_pixel(
                values, image, y + source // 3 - 1, x + source % 3 - 1, exists,
                head, heads, height, width, head_dim, lanes,
            )
            weight = tl.exp(_load_logit(logits, window, target, source, exists, head, heads, scale) - lse)
            grad_logit = weight * (tl.sum(grad_output * value, axis=1) - average) * scale
            offset = (window * heads + head).to(tl.int64) * 81 + target * 9 + source
            tl.store(grad_logits + offset, grad_logit.to(grad_logits.dtype.element_ty), mask=exists)
