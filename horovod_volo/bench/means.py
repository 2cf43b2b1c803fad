"""Means of few measurements, and the difference of two means, with intervals that hold 95 %.

Student's t serves as the distribution: the median and its bootstrap, which benchmarks of speed use, need more
samples than there are seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

_INSIDE = 0.95
_FARTHEST, _STEP = 200.0, 1e-4  # of the integral; one degree of freedom ends at 12.7


@dataclass(frozen=True)
class Mean:
    """A mean, or a difference of means, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


def mean_of(samples: Sequence[float]) -> Mean:
    """Return the mean of two or more samples with its interval."""
    error = math.sqrt(variance(samples) / len(samples))
    return _around(fmean(samples), error, len(samples) - 1)


def difference_of(first: Sequence[float], second: Sequence[float]) -> Mean:
    """Return the mean of `first` less that of `second`, by Welch's formula: the spreads may differ."""
    parts = [variance(samples) / len(samples) for samples in (first, second)]
    total = sum(parts)
    weights = [part**2 / (len(samples) - 1) for part, samples in zip(parts, (first, second), strict=True)]
    freedom = total**2 / sum(weights) if total else 1.0
    return _around(fmean(first) - fmean(second), math.sqrt(total), freedom)


def t_quantile(freedom: float) -> float:
    """Return within how many standard errors of its mean Student's t lies with 95 %."""
    places = np.arange(0, _FARTHEST, _STEP) + _STEP / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(places**2 / freedom))
    return float(places[np.searchsorted(np.cumsum(density) * _STEP, _INSIDE / 2)])


def _around(value: float, error: float, freedom: float) -> Mean:
    reach = t_quantile(freedom) * error
    return Mean(value, value - reach, value + reach)
