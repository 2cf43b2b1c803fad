"""Time of one collective on a network: a start, a time per hop, and a time per byte.

Rates are bus rates, as NCCL's tests report them: an all-reduce of S bytes takes 2(N-1)/N S over the rate. The
rate between hosts is that of all network cards of a host together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.bench.scaling_study.constants import constant


@dataclass(frozen=True)
class Fabric:
    """What connects the ranks; times in seconds, rates in bytes per second."""

    name: str
    ranks_per_host: int
    start: float  # of each collective
    ring_hop_inside: float
    ring_hop_between: float
    tree_hop_inside: float
    tree_hop_between: float
    inside: float  # rate inside a host
    between: float  # rate between hosts

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts of so many ranks."""
        return math.ceil(ranks / self.ranks_per_host)

    def rate(self, ranks: int) -> float:
        """Return the bus rate among so many ranks."""
        return self.between if self.hosts(ranks) > 1 else self.inside


def _nccl(name: str, gpu: str) -> Fabric:
    hops = ("nccl ring hop inside", "nccl ring hop between", "nccl tree hop inside", "nccl tree hop between")
    rates = (f"{gpu} inside", f"{gpu} between")
    return Fabric(name, 8, *map(constant, ("nccl start", *hops, *rates)))


FABRICS = {
    "a100-hdr": _nccl("DGX A100, 8 x HDR200", "a100"),
    "h200-ndr": _nccl("8 x H200, 8 x NDR400", "h200"),
    "a100-25gbe": Fabric(
        name="4 x A100, 25 GbE",
        ranks_per_host=4,
        start=constant("nccl start"),
        ring_hop_inside=constant("nccl ring hop inside"),
        ring_hop_between=constant("ethernet hop"),
        tree_hop_inside=constant("nccl tree hop inside"),
        tree_hop_between=constant("ethernet hop"),
        inside=constant("ethernet inside"),
        between=constant("ethernet between"),
    ),
}


def ring_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a ring all-reduce: 2(N-1) hops, of which 2(H-1) are between hosts."""
    if ranks == 1:
        return 0.0
    between = 2 * (fabric.hosts(ranks) - 1)
    inside = 2 * (ranks - 1) - between
    hops = inside * fabric.ring_hop_inside + between * fabric.ring_hop_between
    return fabric.start + hops + _bus_factor(ranks) * size / fabric.rate(ranks)


def tree_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a tree all-reduce: up and down a chain in each host and a tree of hosts."""
    if ranks == 1:
        return 0.0
    chain = min(ranks, fabric.ranks_per_host) - 1
    levels = math.ceil(math.log2(fabric.hosts(ranks)))
    hops = 2 * (chain * fabric.tree_hop_inside + levels * fabric.tree_hop_between)
    return fabric.start + hops + _bus_factor(ranks) * size / fabric.rate(ranks)


def hierarchical_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a reduce-scatter in hosts, then a ring between them, then an all-gather in hosts."""
    if ranks == 1:
        return 0.0
    members, hosts = min(ranks, fabric.ranks_per_host), fabric.hosts(ranks)
    hops = 2 * (members - 1) * fabric.ring_hop_inside + 2 * (hosts - 1) * fabric.ring_hop_between
    bytes_seconds = _bus_factor(members) * size / fabric.inside + _bus_factor(hosts) * size / fabric.between
    collectives = (2 if members > 1 else 0) + (1 if hosts > 1 else 0)
    return collectives * fabric.start + hops + bytes_seconds


def all_reduce_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of the fastest algorithm: NCCL chooses it for each size."""
    algorithms = (ring_seconds, tree_seconds, hierarchical_seconds)
    return min(algorithm(size, ranks, fabric) for algorithm in algorithms)


def parameter_server_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time to send all gradients to rank 0 and receive its weights, in pieces, at the same time.

    One link carries the bytes of N-1 workers, in the best case in both directions at the same time.
    """
    if ranks == 1:
        return 0.0
    hop = fabric.ring_hop_between if fabric.hosts(ranks) > 1 else fabric.ring_hop_inside
    return fabric.start + 2 * hop + (ranks - 1) * size / fabric.rate(ranks)


def _bus_factor(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


class Point(NamedTuple):
    """One measured all-reduce."""

    ranks: int
    size: float  # bytes
    seconds: float


def calibrated(points: Sequence[Point]) -> Fabric:
    """Fit a network with one rank per host to measured rings, by relative least squares.

    No cost is negative: those that would be are left out.
    """
    rows = np.array([[1.0, 2 * (n - 1), _bus_factor(n) * size] for n, size, _ in points])
    weights = 1 / np.array([point.seconds for point in points])
    start, hop, byte = _nonnegative_least_squares(rows * weights[:, None])
    if byte == 0:
        raise ValueError("the measured times do not grow with the size: the rate cannot be fitted")
    return Fabric("calibrated", 1, start, hop, hop, hop, hop, 1 / byte, 1 / byte)


def _nonnegative_least_squares(rows: NDArray[np.float64]) -> list[float]:
    """Solve rows x costs = 1 by the best subset of the costs whose solution is positive."""
    target = np.ones(len(rows))
    best, least = np.zeros(rows.shape[1]), float(len(rows))
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            found, *_ = np.linalg.lstsq(rows[:, chosen], target, rcond=None)
            error = float(np.sum((rows[:, chosen] @ found - target) ** 2))
            # More costs must reduce the error by more than rounding does.
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(rows.shape[1]), error
                best[list(chosen)] = found
    return [float(cost) for cost in best]
