"""The learning rate as a function of the step: nothing to store, nothing to restore."""

from __future__ import annotations

import math


def lr_at(
    step: int,
    *,
    peak: float,
    start: float,
    floor: float,
    warmup: int,
    cosine: int,
    prefix: int = 0,
    stride: int = 1,
) -> float:
    """Linear warm-up from `start`, then half a cosine of `cosine` steps down to `floor`, where it stays.

    As published, the cosine counts from the first step: after the warm-up it is joined where it stands, a
    little below `peak`. Of a warm-up that comes before, `prefix` is the length: the cosine counts from its
    end. The rate changes every `stride` steps: with an epoch's steps it is the published one, which stays
    through each epoch what it is at its begin.
    """
    step -= step % stride
    if step < warmup:
        return start + (peak - start) * step / warmup
    step -= prefix
    if step < cosine:
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * step / cosine))
    return floor
