"""How late the last of many ranks is, where each rank's step varies by itself: all wait for it.

In units of one rank's standard deviation, for normal variation.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

_REACH = 10.0  # standard deviations; beyond it there is nobody
_GRAIN = 20_001


def expected_largest(ranks: int) -> float:
    """Return the mean of the largest of so many draws: the integral of 1 - F^N above zero less F^N below."""
    x = np.linspace(0.0, _REACH, _GRAIN)
    above = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    below = 1 - above  # of -x
    return float(np.trapezoid(1 - above**ranks - below**ranks, x))


def sampled_largest(ranks: int, draws: int, seed: int) -> list[float]:
    """Draw how late the last rank is, step by step: the inverse of F^N at a uniform number."""
    normal = NormalDist()
    uniform = np.random.default_rng(seed).uniform(1e-12, 1 - 1e-12, size=draws)
    # The root of a number near 1 is 1 in floating point where ranks are many: its distance from 1 is kept.
    late = -np.expm1(np.log(uniform) / ranks)
    return [-normal.inv_cdf(float(value)) for value in late]
