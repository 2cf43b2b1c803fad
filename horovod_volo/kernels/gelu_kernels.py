"""The Triton kernel of GELU's backward, which recomputes its output and sums the gradient over tokens.

Sums are written for each program and added afterwards, without atomics, so results are reproducible.
"""

# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


# `count` is not specialized: drop path changes it from step to step, and programs would be compiled again.
@triton.jit(do_not_specialize=["count"])
def gelu_backward(
    gradient, x, grad_x, activated, parts, count, channels,
    tile: tl.constexpr, lanes: tl.constexpr, programs: tl.constexpr,
):
    """Write the gradient of x (count, channels), GELU of x, and this program's part of the gradient's sum."""
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    total = tl.zeros((lanes,), tl.float32)
    for first in range(tl.program_id(0) * tile, count, programs * tile):
        row = first + tl.arange(0, tile)
        inside = (row < count)[:, None] & (lane < channels)[None, :]
        offsets = row.to(tl.int64)[:, None] * channels + lane[None, :]
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        incoming = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        # The normal distribution below x, and its density at x.
        below = 0.5 * (1.0 + tl.math.erf(value * 0.7071067811865476))
        density = tl.exp(-0.5 * value * value) * 0.3989422804014327
        through = (incoming * (below + value * density)).to(grad_x.dtype.element_ty)
        tl.store(grad_x + offsets, through, mask=inside)
        tl.store(activated + offsets, (value * below).to(activated.dtype.element_ty), mask=inside)
        total += tl.sum(through.to(tl.float32), axis=0)
    tl.store(parts + tl.program_id(0) * channels + lane, total, mask=lane < channels)
