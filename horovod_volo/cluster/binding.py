"""Which part of its host a rank gets, worked out from the host and the rank's seat in it.

Every rank works out the seats of all ranks of its host, so that parts do not overlap though ranks have
not met yet. Nothing is touched here: `pinning.py` does what is planned.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from horovod_volo.cluster.topology import (
    UNKNOWN,
    Card,
    Device,
    Gpu,
    Host,
    cpu_ranges,
    distance,
    node_distance,
)

_CPUS_TO_SPARE = 4  # from so many on, a rank can leave one to Horovod's own thread


@dataclass(frozen=True)
class Seat:
    """A rank's place among those of its host, and what the launcher has settled already."""

    local_rank: int = 0
    local_size: int = 1
    allowed: frozenset[int] = frozenset()  # CPUs that the process may use
    placed: int = 0  # ranks to which the launcher gave these very CPUs, as far as is known; 0: it gave none
    visible: tuple[int, ...] | None = None  # GPUs that CUDA shows the process; None: all of the host


@dataclass(frozen=True)
class Binding:
    """A rank's part of its host."""

    mode: str
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]  # NUMA nodes that memory comes from while they have some; empty: any
    gpu: Gpu | None
    card: Card | None
    cards: tuple[Card, ...]  # of all ranks of the host
    service_cpus: tuple[int, ...]  # for Horovod's thread, one for each rank of the host; empty: any
    threads: int
    remarks: tuple[str, ...] = ()
    placed: bool = False  # where the launcher put the rank

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        cpus = f"CPU{'s' if len(self.cpus) > 1 else ''} {cpu_ranges(self.cpus)}"
        pinned = "" if self.mode != "none" else " (not pinned)"
        memory = f", memory of NUMA node {cpu_ranges(self.nodes)}" if self.nodes else ""
        card = f", {self.card}" if self.card else ""
        return f"{threads} on {cpus}{pinned}{memory}{card}"


def plan(host: Host, seat: Seat, mode: str = "numa") -> Binding:
    """Return what the rank in this seat gets."""
    company, mine = _company(host, seat)
    usable = _usable(host, seat)
    homes = _homes(host, company, usable)
    chosen = _choose_cards(host, company, homes)
    cards = tuple(card for card in host.cards if card in chosen)
    if mode == "none" or seat.placed:
        return _unmoved(host, seat, mode, company[mine], chosen[mine], cards)

    parts = [_part(host, usable, homes, rank, mode) for rank in range(len(company))]
    cpus, sharing = parts[mine]
    known = mine == seat.local_rank and len(company) == seat.local_size
    spare = known and all(len(part) >= _CPUS_TO_SPARE and alone == 1 for part, alone in parts)
    return Binding(
        mode=mode,
        cpus=cpus,
        nodes=_memory(host, cpus),
        gpu=company[mine],
        card=chosen[mine],
        cards=cards,
        service_cpus=tuple(part[-1] for part, _ in parts) if spare else (),
        threads=max(1, len(cpus) // sharing),
        remarks=_remarks(company, mine, homes, cpus, sharing),
    )


def _unmoved(
    host: Host, seat: Seat, mode: str, gpu: Gpu | None, card: Card | None, cards: tuple[Card, ...]
) -> Binding:
    """Return the part of a rank that stays on the CPUs it was started on."""
    cpus = tuple(sorted(seat.allowed))
    threads = max(1, len(cpus) // (seat.placed or seat.local_size))
    if mode == "none":
        return Binding(mode, cpus, (), gpu, card, cards, (), threads)
    kept = f"the launcher gave this rank CPUs {cpu_ranges(cpus)}: they are kept"
    return Binding(mode, cpus, _memory(host, cpus), gpu, card, cards, (), threads, (kept,), placed=True)


def _remarks(
    company: list[Gpu | None], mine: int, homes: list[tuple[int, ...]], cpus: tuple[int, ...], sharing: int
) -> tuple[str, ...]:
    remarks = []
    gpu, home = company[mine], homes[mine]
    if gpu is not None and _all_at_nodes(company) and gpu.node not in home:
        remarks.append(
            f"GPU {gpu.name} is at NUMA node {gpu.node}, of which this process may use no CPU: "
            f"node {cpu_ranges(home)} is the nearest"
        )
    if sharing > 1:
        remarks.append(f"{sharing} ranks share CPUs {cpu_ranges(cpus)}: there are fewer cores than ranks")
    return tuple(remarks)


def _company(host: Host, seat: Seat) -> tuple[list[Gpu | None], int]:
    """Return the GPUs of all ranks of the host, and which of these ranks is this one."""
    shown = tuple(range(len(host.gpus))) if seat.visible is None else seat.visible
    if len(shown) >= seat.local_size:
        return [host.gpus[number] for number in shown[: seat.local_size]], seat.local_rank
    if len(shown) != 1:
        return [None] * seat.local_size, seat.local_rank
    # Each rank sees its own alone. The others' are taken to stand beside it, in the order of ranks.
    first = shown[0] - seat.local_rank
    if first >= 0 and first + seat.local_size <= len(host.gpus):
        return list(host.gpus[first : first + seat.local_size]), seat.local_rank
    if seat.local_size > len(host.gpus):
        return [host.gpus[shown[0]]] * seat.local_size, seat.local_rank
    return list(host.gpus), shown[0]


def _usable(host: Host, seat: Seat) -> dict[int, set[int]]:
    """Return the CPUs that the process may use, by NUMA node."""
    by_node = {node: seat.allowed & set(cpus) for node, cpus in sorted(host.nodes.items())}
    return {node: set(cpus) for node, cpus in by_node.items() if cpus} or {0: set(seat.allowed)}


def _homes(host: Host, company: list[Gpu | None], usable: dict[int, set[int]]) -> list[tuple[int, ...]]:
    """Return each rank's NUMA nodes: the one nearest its GPU, or an equal share of them."""
    nodes, ranks = tuple(usable), len(company)
    if _all_at_nodes(company):
        at = [gpu.node for gpu in company if gpu is not None]
        return [(min(nodes, key=lambda node: node_distance(host, home, node)),) for home in at]
    if ranks >= len(nodes):
        return [(nodes[rank * len(nodes) // ranks],) for rank in range(ranks)]
    cuts = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    return [nodes[first:last] for first, last in pairwise(cuts)]


def _all_at_nodes(company: list[Gpu | None]) -> bool:
    return all(gpu is not None and gpu.node != UNKNOWN for gpu in company)


def _part(
    host: Host, usable: dict[int, set[int]], homes: list[tuple[int, ...]], rank: int, mode: str
) -> tuple[tuple[int, ...], int]:
    """Return a rank's CPUs, and how many ranks share them."""
    home = homes[rank]
    there = set().union(*(usable[node] for node in home))
    unlisted = there.difference(*host.cores)
    every = sorted([*host.cores, *((cpu,) for cpu in unlisted)])
    cores = [threads for core in every if (threads := [cpu for cpu in core if cpu in there])]
    at_home = [other for other, its in enumerate(homes) if its == home]
    place, sharing = at_home.index(rank), 1
    if len(cores) < len(at_home):
        sharing = len(at_home)
    else:
        first, last = (number * len(cores) // len(at_home) for number in (place, place + 1))
        cores = cores[first:last]
    taken = [core[:1] if mode == "core" else core for core in cores]
    return tuple(sorted(cpu for core in taken for cpu in core)), sharing


def _choose_cards(host: Host, company: list[Gpu | None], homes: list[tuple[int, ...]]) -> list[Card | None]:
    """Give each rank the nearest card; of equally near ones, that which fewest ranks before it have."""
    taken: Counter[Card] = Counter()
    chosen: list[Card | None] = []
    for gpu, home in zip(company, homes, strict=True):
        place = gpu or Device("", (), home[0])
        ways = {card: distance(host, place, card) for card in host.cards}
        card = min(ways, key=lambda card: (ways[card], taken[card]), default=None)
        chosen.append(card)
        taken.update([card] if card else [])
    return chosen


def _memory(host: Host, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Return the NUMA nodes of these CPUs, or none where that would be all there are."""
    nodes = tuple(node for node, its in sorted(host.nodes.items()) if set(its) & set(cpus))
    with_cpus = [node for node, its in host.nodes.items() if its]
    return nodes if len(nodes) < len(with_cpus) else ()
