"""What one program of the fused outlook attention does: some cells, one head, in Triton.

A cell is the 2 x 2 pixels from a window's centre to the right and below; four windows reach into it. Every
result has one writer: no atomics, the same sums every time. All sums are in fp32. Invariant: cells and lanes
are the only axes of a tile, so that a sum over a window's places stays within a thread.
"""

# One argument a line would hide what a program does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _own(heads, cells: tl.constexpr):
    """Return this program's cells and its head; the heads of a pixel lie side by side, so they come first."""
    program = tl.program_id(0)
    return program // heads * cells + tl.arange(0, cells), program % heads


@triton.jit
def _window(cell, down, right, count, rows, columns):
    """Return the windows so far from the cells, whether they are there, and where their centres are."""
    row = cell // columns % rows + down
    column = cell % columns + right
    there = (cell < count) & (row < rows) & (column < columns)
    return cell + down * columns + right, there, 2 * row, 2 * column


@triton.jit
def _pixels(image, y, x, there, head, heads, height, width, depth: tl.constexpr, lanes: tl.constexpr):
    """Return where one pixel of each cell is, (cells, lanes), and whether it is in the image."""
    lane = tl.arange(0, lanes)
    inside = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    first = (((image * height + y) * width + x) * heads + head).to(tl.int64) * depth
    return first[:, None] + lane, inside[:, None] & (lane < depth)


@triton.jit
def _loaded(
    pixels, image, y, x, there, head, heads, height, width, depth: tl.constexpr, lanes: tl.constexpr
):
    """Load one pixel of each cell, zeros outside of the image."""
    at, inside = _pixels(image, y, x, there, head, heads, height, width, depth, lanes)
    return tl.load(pixels + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _score(scores, window, target, source, there, head, heads, scale):
    """Load one score of each window, already scaled."""
    at = (window * heads + head).to(tl.int64) * 81 + target * 9 + source
    return tl.load(scores + at, mask=there, other=0.0).to(tl.float32) * scale


@triton.jit
def _largest(scores, window, target, there, head, heads, scale):
    """Return the largest score of a target."""
    largest = _score(scores, window, target, 0, there, head, heads, scale)
    for source in tl.static_range(1, 9):
        largest = tl.maximum(largest, _score(scores, window, target, source, there, head, heads, scale))
    return largest


@triton.jit
def _mixed(
    values, scores, window, target, there, y, x, image, head, heads, height, width, scale,
    depth: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Return the mix that each window makes for one target, and its softmax's largest score and sum."""
    largest = _largest(scores, window, target, there, head, heads, scale)
    total = tl.zeros((cells,), tl.float32)
    mix = tl.zeros((cells, lanes), tl.float32)
    for source in tl.static_range(9):
        power = tl.exp(_score(scores, window, target, source, there, head, heads, scale) - largest)
        total += power
        mix += power[:, None] * _loaded(
            values, image, y + source // 3 - 1, x + source % 3 - 1, there,
            head, heads, height, width, depth, lanes,
        )
    return mix / total[:, None], largest, total


@triton.jit
def _returned(
    gradient, scores, logarithms, window, source, there, y, x, image, head, heads, height, width, scale,
    depth: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Return the gradient that each window gives back to one source."""
    back = tl.zeros((cells, lanes), tl.float32)
    for target in tl.static_range(9):
        at = (window * heads + head) * 9 + target
        logarithm = tl.load(logarithms + at, mask=there, other=0.0)
        share = tl.exp(_score(scores, window, target, source, there, head, heads, scale) - logarithm)
        back += share[:, None] * _loaded(
            gradient, image, y + target // 3 - 1, x + target % 3 - 1, there,
            head, heads, height, width, depth, lanes,
        )
    return back


@triton.jit
def gather(
    taken, scores, logarithms, given, count, heads, rows, columns, height, width, scale,
    backward: tl.constexpr, depth: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Give each pixel its sum over the windows that reach it: of mixes, or of gradients of its values."""
    cell, head = _own(heads, cells)
    image = cell // (rows * columns)
    _, in_image, top, left = _window(cell, 0, 0, count, rows, columns)
    for corner in tl.static_range(4):
        total = tl.zeros((cells, lanes), tl.float32)
        for reached in tl.static_range(4):
            # A cell's own window reaches all its pixels, the one to the right those at its right, and so on.
            if reached // 2 <= corner // 2 and reached % 2 <= corner % 2:
                place = 4 + 3 * (corner // 2) + corner % 2 - 6 * (reached // 2) - 2 * (reached % 2)
                window, there, y, x = _window(cell, reached // 2, reached % 2, count, rows, columns)
                if backward:
                    total += _returned(
                        taken, scores, logarithms, window, place, there, y, x, image,
                        head, heads, height, width, scale, depth, lanes, cells,
                    )
                else:
                    mix, _largest_score, _sum = _mixed(
                        taken, scores, window, place, there, y, x, image,
                        head, heads, height, width, scale, depth, lanes, cells,
                    )
                    total += mix
        y, x = top + corner // 2, left + corner % 2
        at, inside = _pixels(image, y, x, in_image, head, heads, height, width, depth, lanes)
        tl.store(given + at, total.to(given.dtype.element_ty), mask=inside)


@triton.jit
def differentiate_scores(
    gradient, values, scores, of_scores, logarithms, count, heads, rows, columns, height, width, scale,
    depth: tl.constexpr, lanes: tl.constexpr, cells: tl.constexpr,
):
    """Give each window the gradient of its scores, and the logarithms of its targets' sums."""
    cell, head = _own(heads, cells)
    image = cell // (rows * columns)
    window, there, y, x = _window(cell, 0, 0, count, rows, columns)
    for target in range(9):
        above = _loaded(
            gradient, image, y + target // 3 - 1, x + target % 3 - 1, there,
            head, heads, height, width, depth, lanes,
        )
        mix, largest, total = _mixed(
            values, scores, window, target, there, y, x, image,
            head, heads, height, width, scale, depth, lanes, cells,
        )
        logarithm = largest + tl.log(total)
        tl.store(logarithms + (window * heads + head) * 9 + target, logarithm, mask=there)
        average = tl.sum(mix * above, axis=1)
        for source in tl.static_range(9):
            below = _loaded(
                values, image, y + source // 3 - 1, x + source % 3 - 1, there,
                head, heads, height, width, depth, lanes,
            )
            share = tl.exp(_score(scores, window, target, source, there, head, heads, scale) - logarithm)
            change = share * (tl.sum(above * below, axis=1) - average) * scale
            at = (window * heads + head).to(tl.int64) * 81 + target * 9 + source
            tl.store(of_scores + at, change.to(of_scores.dtype.element_ty), mask=there)
