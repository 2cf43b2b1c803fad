"""Triton kernels of outlook attention, and of the cross-entropy with sparse soft targets.

Outlook attention has windows of 3 x 3 pixels at a stride of 2. A window has 9 targets (its pixels in the
output), each with a softmax over 9 sources (its pixels in the input). A cell is the 2 x 2 pixels from a
window's centre to the right and down; four windows overlap it. Every element of the output is written once:
no atomics, so results are reproducible.

The cross-entropy has one program per row. Forward reads the logits once; backward reads them once and may
overwrite them by their gradient. Entries of one class are merged in one of two ways. Few entries are compared
with each other, and the lane of a class's first entry writes the class, with the sum over all its entries.
Many are first added to a table with one integer for each class, in units of 1 / UNIT.

Invariant: results are bitwise reproducible: sums of integers do not depend on their order. All sums are fp32.
"""

# `count` is not specialized: where it changes from step to step, programs would be compiled again.
# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# The sum of a class's weights may be up to 8e6 and is exact to 1e-12, less than fp32's rounding of 1e-5.
UNIT = tl.constexpr(2.0**40)


@triton.jit
def _pixel_offsets(
    image, y, x, exists, head, heads, height, width, head_dim: tl.constexpr, lanes: tl.constexpr
):
    """Return the offsets of pixels, with the channels of the head as last axis, and whether they exist."""
    lane = tl.arange(0, lanes)
    inside = exists & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    first = (((image * height + y) * width + x) * heads + head).to(tl.int64) * head_dim
    return tl.expand_dims(first, -1) + lane, tl.expand_dims(inside, -1) & (lane < head_dim)


@triton.jit(do_not_specialize=["count"])
def softmax_sums(logits, log2_sums, count, scale, rows: tl.constexpr):
    """Write the binary logarithm of the sum of exponentials of each target's 9 logits."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    exists = row < count
    first, unit = logits + row.to(tl.int64) * 9, scale * _LOG2_E
    maximum = tl.full((rows,), float("-inf"), tl.float32)
    for source in tl.static_range(9):
        maximum = tl.maximum(maximum, tl.load(first + source, mask=exists, other=0.0).to(tl.float32) * unit)
    total = tl.zeros((rows,), tl.float32)
    for source in tl.static_range(9):
        logit = tl.load(first + source, mask=exists, other=0.0).to(tl.float32) * unit
        total += tl.exp2(logit - maximum)
    tl.store(log2_sums + row, maximum + tl.log2(total), mask=exists)


@triton.jit
def _plus_weighted(total, pixel, logit_at, sum_at, exists, scale):
    """Add a pixel, multiplied by its weight."""
    logit = tl.load(logit_at, mask=exists, other=0.0).to(tl.float32) * (scale * _LOG2_E)
    log2_sum = tl.load(sum_at, mask=exists, other=0.0)
    return total + tl.exp2(logit - log2_sum)[:, None] * pixel


@triton.jit(do_not_specialize=["count"])
def aggregate_windows(
    pixels, logits, log2_sums, output, count, heads, rows, columns, height, width, scale,
    backward: tl.constexpr, head_dim: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Sum over the windows that overlap each pixel: attention outputs, or in backward gradients of values.

    `pixels` are the values, or in backward the gradient of the attention's output. Heads vary first from
    program to program, as they are adjacent in memory.
    """
    program = tl.program_id(0)
    cell, head = program // heads * cells + tl.arange(0, cells), program % heads
    image, row, column = cell // (rows * columns), cell // columns % rows, cell % columns
    top_left = tl.zeros((cells, lanes), tl.float32)
    top_right, bottom_left, bottom_right = top_left, top_left, top_left
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            exists = (cell < count) & (row + down < rows) & (column + right < columns)
            window = (cell + down * columns + right) * heads + head
            at, sums_at = logits + window.to(tl.int64) * 81, log2_sums + window * 9
            # The cell's first pixel is the centre of its own window. The window to the right has only the
            # pixels on the right, and so on. Forward, they are targets; backward, they are sources.
            first = 4 - 6 * down - 2 * right
            own, others = (1, 9) if backward else (9, 1)
            for other in range(9):  # not unrolled: that would take all registers
                y, x = 2 * (row + down) + other // 3 - 1, 2 * (column + right) + other % 3 - 1
                offsets, inside = _pixel_offsets(
                    image, y, x, exists, head, heads, height, width, head_dim, lanes
                )
                pixel = tl.load(pixels + offsets, mask=inside, other=0.0).to(tl.float32)
                place = at + other * others + first * own
                target = sums_at + (other if backward else first)
                step = 0 if backward else 1
                bottom_right = _plus_weighted(
                    bottom_right, pixel, place + 4 * own, target + 4 * step, exists, scale
                )
                if right == 0:
                    bottom_left = _plus_weighted(
                        bottom_left, pixel, place + 3 * own, target + 3 * step, exists, scale
                    )
                if down == 0:
                    top_right = _plus_weighted(top_right, pixel, place + own, target + step, exists, scale)
                if down + right == 0:
                    top_left = _plus_weighted(top_left, pixel, place, target, exists, scale)
    for corner in tl.static_range(4):
        total = (
            (top_left if corner == 0 else top_right) if corner < 2
            else (bottom_left if corner == 2 else bottom_right)
        )
        offsets, inside = _pixel_offsets(
            image, 2 * row + corner // 2, 2 * column + corner % 2, cell < count,
            head, heads, height, width, head_dim, lanes,
        )
        tl.store(output + offsets, total.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def logits_backward(
    gradient, values, logits, grad_logits, log2_sums, count, heads, rows, columns, height, width, scale,
    head_dim: tl.constexpr, lanes: tl.constexpr, windows: tl.constexpr,
):
    """Write the gradient of each window's logits.

    Targets and sources are padded from 9 to 16, for the tensor cores.
    """
    program = tl.program_id(0)
    window, head = program // heads * windows + tl.arange(0, windows), program % heads
    image, row, column = window // (rows * columns), window // columns % rows, window % columns
    place = tl.arange(0, 16)
    offsets, inside = _pixel_offsets(
        image[:, None], 2 * row[:, None] + place // 3 - 1, 2 * column[:, None] + place % 3 - 1,
        (window < count)[:, None] & (place < 9), head, heads, height, width, head_dim, lanes,
    )
    of_targets = tl.load(gradient + offsets, mask=inside, other=0.0)
    of_sources = tl.load(values + offsets, mask=inside, other=0.0)
    grad_weights = tl.dot(of_targets, tl.permute(of_sources, (0, 2, 1)), input_precision="ieee")
    exists = (window < count)[:, None, None] & (place < 9)[:, None] & (place < 9)
    softmax = (window * heads + head)[:, None] * 9 + place  # (windows, targets)
    positions = softmax.to(tl.int64)[:, :, None] * 9 + place
    logit = tl.load(logits + positions, mask=exists, other=float("-inf")).to(tl.float32) * (scale * _LOG2_E)
    log2_sum = tl.load(log2_sums + softmax, mask=(window < count)[:, None] & (place < 9), other=0.0)
    weight = tl.exp2(logit - log2_sum[:, :, None])
    # The softmax's backward: weight * (grad_weight - sum of weights * grad_weights).
    average = tl.sum(weight * grad_weights, axis=2)
    grad_logit = weight * (grad_weights - average[:, :, None]) * scale
    tl.store(grad_logits + positions, grad_logit.to(grad_logits.dtype.element_ty), mask=exists)


@triton.jit
def loss_kernel(
    logits, uniform, ids, weights, loss, lse, classes, entries,
    block_classes: tl.constexpr, block_entries: tl.constexpr,
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


@triton.jit
def table_kernel(ids, weights, table, classes, entries, block_entries: tl.constexpr):
    """Add the weights of one block of a row's entries to the row of the table."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block_entries + tl.arange(0, block_entries)
    id = tl.load(ids + row * entries + index, mask=index < entries, other=0)
    weight = tl.load(weights + row * entries + index, mask=index < entries, other=0.0)
    units = (weight * UNIT).to(tl.int64)
    tl.atomic_add(table + row * classes + id, units, mask=index < entries, sem="relaxed")


@triton.jit
def gradient_kernel(
    logits, uniform, ids, weights, lse, grad_loss, grad, table, classes, entries,
    tabled: tl.constexpr, block_classes: tl.constexpr, block_entries: tl.constexpr,
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
