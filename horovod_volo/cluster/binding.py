"""Chooses the CPUs, the GPU and the NIC of a rank from the topology of its host.

Linux allocates memory on the NUMA node of the CPU that writes it first: that of a rank which is bound to the
CPUs of one node lies there, as long as some is free.
Each rank computes the choice for all ranks of its host, so that no CPUs overlap although Horovod is not
initialized yet. Nothing is changed here: `pinning.py` applies the result.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from horovod_volo.cluster.topology import UNKNOWN, Device, Host, Nic, cpu_ranges, distance, node_distance
from horovod_volo.core.errors import counted


@dataclass(frozen=True)
class LaunchedRank:
    """A local rank as the launcher started it."""

    local_rank: int = 0
    local_size: int = 1
    allowed_cpus: frozenset[int] = frozenset()
    # Ranks that the launcher bound to these CPUs, as far as is known; 0: the launcher did not bind.
    ranks_bound_here: int = 0
    visible_gpus: tuple[int, ...] | None = None  # indices in Host.gpus; None: all


@dataclass(frozen=True)
class Binding:
    """The hardware of its host that a rank uses."""

    mode: str
    cpus: tuple[int, ...]
    gpu: Device | None = None
    nic: Nic | None = None
    nics: tuple[Nic, ...] = ()  # of all ranks of the host
    threads: int = 1
    warnings: tuple[str, ...] = ()
    by_launcher: bool = False  # the launcher had bound the rank, and that was not changed

    def __str__(self) -> str:
        cpus = f"CPU{'s' if len(self.cpus) > 1 else ''} {cpu_ranges(self.cpus)}"
        pinned = "" if self.mode != "none" else " (not pinned)"
        nic = f", {self.nic}" if self.nic else ""
        return f"{counted(self.threads, 'thread')} on {cpus}{pinned}{nic}"


def plan_binding(host: Host, rank: LaunchedRank, mode: str = "numa") -> Binding:
    """Return the binding of a rank; `mode` is a value of --binding."""
    gpus, index = _gpus_of_ranks(host, rank)
    cpus_by_node = _allowed_cpus_by_node(host, rank)
    nodes_of_ranks = _nodes_of_ranks(host, gpus, cpus_by_node)
    nic_of_ranks = _assign_nics(host, gpus, nodes_of_ranks)
    cpus = tuple(sorted(rank.allowed_cpus))
    unchanged = Binding(
        mode,
        cpus,
        gpu=gpus[index],
        nic=nic_of_ranks[index],
        nics=tuple(nic for nic in host.nics if nic in nic_of_ranks),
        threads=max(1, len(cpus) // (rank.ranks_bound_here or rank.local_size)),
    )
    if mode == "none":
        return unchanged
    if rank.ranks_bound_here:
        warning = f"the launcher bound this rank to CPUs {cpu_ranges(cpus)}: --binding does not change that"
        return replace(unchanged, warnings=(warning,), by_launcher=True)
    cpus, sharing_ranks = _cpus_of_rank(host, cpus_by_node, nodes_of_ranks, index, mode)
    gpu, nodes, warnings = gpus[index], nodes_of_ranks[index], []
    if gpu is not None and _all_have_nodes(gpus) and gpu.node not in nodes:
        warnings.append(
            f"GPU {gpu.name} is at NUMA node {gpu.node}, but this process may use no CPU there: "
            f"node {cpu_ranges(nodes)} is the nearest"
        )
    if sharing_ranks > 1:
        warnings.append(
            f"{sharing_ranks} ranks share CPUs {cpu_ranges(cpus)}: there are fewer cores than ranks"
        )
    return replace(unchanged, cpus=cpus, threads=max(1, len(cpus) // sharing_ranks), warnings=tuple(warnings))


def _gpus_of_ranks(host: Host, rank: LaunchedRank) -> tuple[list[Device | None], int]:
    """Return the GPU of each rank of the host, and the index of `rank` in this list."""
    visible = tuple(range(len(host.gpus))) if rank.visible_gpus is None else rank.visible_gpus
    if len(visible) >= rank.local_size:
        return [host.gpus[number] for number in visible[: rank.local_size]], rank.local_rank
    if len(visible) != 1:
        return [None] * rank.local_size, rank.local_rank
    # The scheduler shows each rank one GPU. Assume that local ranks have consecutive GPUs.
    first = visible[0] - rank.local_rank
    if first >= 0 and first + rank.local_size <= len(host.gpus):
        return list(host.gpus[first : first + rank.local_size]), rank.local_rank
    if rank.local_size > len(host.gpus):
        return [host.gpus[visible[0]]] * rank.local_size, rank.local_rank
    return list(host.gpus), visible[0]


def _allowed_cpus_by_node(host: Host, rank: LaunchedRank) -> dict[int, set[int]]:
    """Return the CPUs that the process may use, by NUMA node; nodes without any are omitted."""
    by_node = {node: rank.allowed_cpus & set(cpus) for node, cpus in sorted(host.nodes.items())}
    return {node: set(cpus) for node, cpus in by_node.items() if cpus} or {0: set(rank.allowed_cpus)}


def _nodes_of_ranks(
    host: Host, gpus: list[Device | None], cpus_by_node: dict[int, set[int]]
) -> list[tuple[int, ...]]:
    """Return the NUMA nodes of each rank: the one nearest to its GPU, or an equal part of all nodes."""
    nodes, ranks = tuple(cpus_by_node), len(gpus)
    if _all_have_nodes(gpus):
        gpu_nodes = [gpu.node for gpu in gpus if gpu is not None]
        return [(min(nodes, key=lambda node: node_distance(host, at, node)),) for at in gpu_nodes]
    cuts = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    return [nodes[first : max(first + 1, last)] for first, last in pairwise(cuts)]


def _all_have_nodes(gpus: list[Device | None]) -> bool:
    return all(gpu is not None and gpu.node != UNKNOWN for gpu in gpus)


def _cpus_of_rank(
    host: Host, cpus_by_node: dict[int, set[int]], nodes_of_ranks: list[tuple[int, ...]], rank: int, mode: str
) -> tuple[tuple[int, ...], int]:
    """Return the CPUs of a rank, and the number of ranks that share them."""
    nodes = nodes_of_ranks[rank]
    allowed = set().union(*(cpus_by_node[node] for node in nodes))
    without_core = allowed.difference(*host.cores)
    all_cores = sorted([*host.cores, *((cpu,) for cpu in without_core)])
    cores = [threads for core in all_cores if (threads := [cpu for cpu in core if cpu in allowed])]
    ranks_here = [other for other, its_nodes in enumerate(nodes_of_ranks) if its_nodes == nodes]
    position, sharing_ranks = ranks_here.index(rank), 1
    if len(cores) < len(ranks_here):
        sharing_ranks = len(ranks_here)
    else:
        first, last = (number * len(cores) // len(ranks_here) for number in (position, position + 1))
        cores = cores[first:last]
    chosen = [core[:1] if mode == "core" else core for core in cores]
    return tuple(sorted(cpu for core in chosen for cpu in core)), sharing_ranks


def _assign_nics(
    host: Host, gpus: list[Device | None], nodes_of_ranks: list[tuple[int, ...]]
) -> list[Nic | None]:
    """Return the nearest NIC of each rank; of equally near ones, the one with the fewest ranks so far."""
    ranks_of_nic: Counter[Nic] = Counter()
    assigned: list[Nic | None] = []
    for gpu, nodes in zip(gpus, nodes_of_ranks, strict=True):
        device = gpu or Device("", (), nodes[0])
        distances = {nic: distance(host, device, nic) for nic in host.nics}
        nic = min(distances, key=lambda nic: (distances[nic], ranks_of_nic[nic]), default=None)
        assigned.append(nic)
        ranks_of_nic.update([nic] if nic else [])
    return assigned
