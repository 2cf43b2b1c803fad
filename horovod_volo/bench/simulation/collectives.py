"""How long one exchange takes on a fabric: a time for each hop, and a time for each byte.

A fabric's rates are bus rates, as NCCL's tests tell them: an all-reduce of S bytes takes 2(N-1)/N S
over the rate. The rate between hosts is that of a host's cards together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fabric:
    """What connects ranks; seconds, and bytes a second."""

    name: str
    ranks_per_host: int
    start: float  # of each exchange
    ring_hop_inside: float
    ring_hop_between: float
    tree_hop_inside: float
    tree_hop_between: float
    inside: float
    between: float

    def hosts(self, ranks: int) -> int:
        """Return on how many hosts so many ranks are."""
        return math.ceil(ranks / self.ranks_per_host)

    def rate(self, ranks: int) -> float:
        """Return the bus rate among so many ranks."""
        return self.between if self.hosts(ranks) > 1 else self.inside


def ring_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a ring all-reduce: 2(N-1) hops, of which 2(H-1) cross hosts."""
    if ranks == 1:
        return 0.0
    between = 2 * (fabric.hosts(ranks) - 1)
    inside = 2 * (ranks - 1) - between
    hops = inside * fabric.ring_hop_inside + between * fabric.ring_hop_between
    return fabric.start + hops + _share(ranks) * size / fabric.rate(ranks)


def tree_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a tree all-reduce: up and down a chain in each host and a tree of hosts."""
    if ranks == 1:
        return 0.0
    chain = min(ranks, fabric.ranks_per_host) - 1
    levels = math.ceil(math.log2(fabric.hosts(ranks)))
    hops = 2 * (chain * fabric.tree_hop_inside + levels * fabric.tree_hop_between)
    return fabric.start + hops + _share(ranks) * size / fabric.rate(ranks)


def hierarchical_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of a scatter inside hosts, a ring between them, a join inside, each in its turn."""
    if ranks == 1:
        return 0.0
    members, hosts = min(ranks, fabric.ranks_per_host), fabric.hosts(ranks)
    hops = 2 * (members - 1) * fabric.ring_hop_inside + 2 * (hosts - 1) * fabric.ring_hop_between
    bytes_seconds = _share(members) * size / fabric.inside + _share(hosts) * size / fabric.between
    exchanges = (2 if members > 1 else 0) + (1 if hosts > 1 else 0)
    return exchanges * fabric.start + hops + bytes_seconds


def all_reduce_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of whichever way is fastest: NCCL chooses so for each size."""
    ways = (ring_seconds, tree_seconds, hierarchical_seconds)
    return min(way(size, ranks, fabric) for way in ways)


def parameter_server_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time to send all gradients to rank 0 and have its weights back, both at once, in pieces.

    One link carries N-1 workers' bytes. The best case: its two directions are busy together.
    """
    if ranks == 1:
        return 0.0
    hop = fabric.ring_hop_between if fabric.hosts(ranks) > 1 else fabric.ring_hop_inside
    return fabric.start + 2 * hop + (ranks - 1) * size / fabric.rate(ranks)


def _share(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks
