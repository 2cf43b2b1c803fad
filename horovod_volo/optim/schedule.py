"""The learning rate as a function of the step: nothing to store, nothing to restore."""

from __future__ import annotations

import math


def lr_at(step: int, *, peak: float, start: float, floor: float, warmup: int, cosine: int) -> float:
    """Linear warm-up from `start` inside half a cosine of `cosine` steps down to `floor`, where it stays.

    As published, the cosine counts from the first step: after the warm-up it is joined where it
    stands, a little below `peak`.
    """
    if step < warmup:
        return start + (peak - start) * step / warmup
    if step < cosine:
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * step / cosine))
    return floor
