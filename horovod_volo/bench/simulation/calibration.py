"""The constants of a network from measured exchanges on it, and how well others are then predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.bench.simulation.collectives import Fabric

_COSTS = 3  # of starting, of a hop, of a byte


class Point(NamedTuple):
    """One measured exchange."""

    ranks: int
    size: float  # bytes
    seconds: float


def calibrated(points: Sequence[Point]) -> Fabric:
    """Return the network, one rank a host, whose ring takes what was measured, in relative least squares.

    No cost is negative: those that would be are left out.
    """
    rows = np.array([[1.0, 2 * (n - 1), 2 * (n - 1) / n * size] for n, size, _ in points])
    weights = 1 / np.array([point.seconds for point in points])
    start, hop, byte = _without_negatives(rows * weights[:, None])
    if byte == 0:
        raise ValueError("the measured times do not grow with the size: no rate can be told")
    return Fabric("calibrated", 1, start, hop, hop, hop, hop, 1 / byte, 1 / byte)


def _without_negatives(rows: NDArray[np.float64]) -> tuple[float, float, float]:
    """Solve rows x costs = 1 by the best of all sets of costs that come out positive."""
    target = np.ones(len(rows))
    best, least = np.zeros(_COSTS), float(len(rows))
    for count in range(1, _COSTS + 1):
        for chosen in combinations(range(_COSTS), count):
            found, *_ = np.linalg.lstsq(rows[:, chosen], target, rcond=None)
            error = float(np.sum((rows[:, chosen] @ found - target) ** 2))
            # More costs must explain more than rounding does.
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(_COSTS), error
                best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])
