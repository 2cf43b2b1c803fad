"""Time of one collective on a network: a start, a time per hop, and a time per byte.

Rates are bus rates, as NCCL's tests report them: an all-reduce of S bytes takes 2(N-1)/N S over the rate. The
rate between hosts is that of all network cards of a host together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

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


FabricName = Literal["a100-hdr", "h200-ndr"]
FABRICS: dict[FabricName, Fabric] = {
    "a100-hdr": _nccl("DGX A100, 8 x HDR200", "a100"),
    "h200-ndr": _nccl("8 x H200, 8 x NDR400", "h200"),
}


def ring_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a ring all-reduce: 2(N-1) hops, of which 2(H-1) are between hosts."""
    between = 2 * (fabric.hosts(ranks) - 1)
    inside = 2 * (ranks - 1) - between
    hops = inside * fabric.ring_hop_inside + between * fabric.ring_hop_between
    return fabric.start + hops + _bus_factor(ranks) * size / fabric.rate(ranks)


def tree_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a tree all-reduce: up and down a chain in each host and a tree of hosts."""
    chain = min(ranks, fabric.ranks_per_host) - 1
    levels = math.ceil(math.log2(fabric.hosts(ranks)))
    hops = 2 * (chain * fabric.tree_hop_inside + levels * fabric.tree_hop_between)
    return fabric.start + hops + _bus_factor(ranks) * size / fabric.rate(ranks)


def hierarchical_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a reduce-scatter in hosts, then a ring between them, then an all-gather in hosts."""
    members, hosts = min(ranks, fabric.ranks_per_host), fabric.hosts(ranks)
    hops = 2 * (members - 1) * fabric.ring_hop_inside + 2 * (hosts - 1) * fabric.ring_hop_between
    bytes_seconds = _bus_factor(members) * size / fabric.inside + _bus_factor(hosts) * size / fabric.between
    collectives = 2 * (members > 1) + (hosts > 1)
    return collectives * fabric.start + hops + bytes_seconds


def all_reduce_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of the fastest algorithm: NCCL chooses it for each size."""
    algorithms = (ring_seconds, tree_seconds, hierarchical_seconds)
    return min(algorithm(size, ranks, fabric) for algorithm in algorithms)


def parameter_server_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time to send all gradients to rank 0 and receive its weights, in pieces, at the same time.

    One link carries the bytes of N-1 workers, in the best case in both directions at the same time.
    """
    hop = fabric.ring_hop_between if fabric.hosts(ranks) > 1 else fabric.ring_hop_inside
    return fabric.start + 2 * hop + (ranks - 1) * size / fabric.rate(ranks)


def _bus_factor(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


class RingTime(NamedTuple):
    """One measured ring all-reduce."""

    ranks: int
    size: float  # bytes
    seconds: float


def calibrated(times: Sequence[RingTime]) -> Fabric:
    """Fit a network with one rank per host to measured rings, by relative least squares.

    No cost is negative: those that would be are left out, the most negative first.
    """
    rows = np.array([[1.0, 2 * (n - 1), _bus_factor(n) * size] for n, size, _ in times])
    rows /= np.array([[time.seconds] for time in times])
    scale = np.linalg.norm(rows, axis=0)  # makes the three costs comparable
    costs, kept = np.zeros(3), [0, 1, 2]
    while (found := np.linalg.lstsq((rows / scale)[:, kept], np.ones(len(rows)), rcond=None)[0]).min() < 0:
        kept.pop(int(found.argmin()))
    costs[kept] = found / scale[kept]
    start, hop, byte = costs.tolist()
    if byte == 0:
        raise ValueError("the measured times do not grow with the size: the rate cannot be fitted")
    return Fabric("calibrated", 1, start, hop, hop, hop, hop, 1 / byte, 1 / byte)
