"""The learning rate as a function of the step, so that checkpoints need no scheduler state."""

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
    """Return the learning rate: linear warm-up from `start`, half a cosine of `cosine` steps, then `floor`.

    As published, the cosine counts from the first step, so that after the warm-up it continues a little
    below `peak`; with a warm-up before the cosine, of `prefix` steps, it counts from the end of that. The
    learning rate changes every `stride` steps; the published one changes at the start of each epoch.
    """
    step -= step % stride
    if step < warmup:
        return start + (peak - start) * step / warmup
    step -= prefix
    if step < cosine:
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * step / cosine))
    return floor
