"""The CPUs, GPU and NIC of each rank: on real machines by hand, and the properties on random machines."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import pytest
from topologies_on_disk import host_of

from horovod_volo.cluster.binding import Binding, LaunchedRank, plan_binding
from horovod_volo.cluster.topology import Device, Host, Nic, cpu_list, cpu_ranges

NICS_OF_A100 = "mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_6 mlx5_7 mlx5_8 mlx5_9"
CPUS_OF_A100 = (
    "48-55,176-183 56-63,184-191 16-23,144-151 24-31,152-159 112-119,240-247 120-127,248-255 80-87,208-215 "
    "88-95,216-223"
)
CPUS_OF_DGX_2 = " ".join(f"{first}-{first + 2},{first + 48}-{first + 50}" for first in range(0, 48, 3))


@dataclass(frozen=True)
class LaunchCase:
    """Ranks on a machine and what each of them should have, rank by rank; None is not checked."""

    machine: str
    ranks: int
    cpus: str
    threads: Sequence[int] | None = None
    gpus: str | None = None  # the bus numbers of their addresses; "-": none
    nics: str | None = None
    warned: Sequence[int] = ()  # the ranks that have a warning
    mode: str = "numa"
    allowed: str = ""  # CPUs; empty: all
    visible: tuple[int, ...] | None = None  # GPUs; None: all
    each_sees_one: bool = False  # rank r sees GPU r alone


A100 = {"gpus": "07 0f 47 4e 87 90 b7 bd", "nics": NICS_OF_A100}
LAUNCHES = {
    "eight ranks of a DGX A100": LaunchCase("dgx_a100", 8, CPUS_OF_A100, [16] * 8, **A100),
    "each of them sees one GPU": LaunchCase("dgx_a100", 8, CPUS_OF_A100, each_sees_one=True, **A100),
    "GPUs in the order in which CUDA shows them": LaunchCase(
        "dgx_a100", 2, "80-87,208-215 88-95,216-223", gpus="bd b7", nics="mlx5_8 mlx5_9", visible=(7, 6)
    ),
    "GPUs of two nodes": LaunchCase(
        "dgx_a100", 2, "48-63,176-191 112-127,240-255", None, "0f 87", "mlx5_0 mlx5_6", visible=(1, 4)
    ),
    "fewer GPUs than ranks are not assigned": LaunchCase(
        "container", 3, "0-7,32-39 8-15,40-47 16-31,48-63", gpus="- - -", visible=(0, 1)
    ),
    "mode core takes one thread of each core": LaunchCase(
        "dgx_a100", 8, "48-55 56-63 16-23 24-31 112-119 120-127 80-87 88-95", [8] * 8, mode="core"
    ),
    "mode none changes no CPUs, but has GPU and NIC": LaunchCase(
        "dgx_a100", 8, " ".join(["0-255"] * 8), [32] * 8, mode="none", **A100
    ),
    "two GPUs of a DGX-2 share the NIC of their switch": LaunchCase(
        "dgx_2", 16, CPUS_OF_DGX_2, [6] * 16, nics=" ".join(f"{nic} {nic}" for nic in NICS_OF_A100.split())
    ),
    "all ranks have the only GPU of a machine": LaunchCase(
        "workstation", 3, "0-3 4-9 10-15", gpus="01 01 01"
    ),
    "two nodes, three ranks": LaunchCase("cpu_vm", 3, "0-1 2-3 4-7"),
    "allowed CPUs of one node": LaunchCase("cpu_vm", 2, "5 6-7", allowed="5-7"),
    "fewer ranks than nodes": LaunchCase(  # the NICs near the first node of each
        "dgx_a100",
        3,
        "0-31,128-159 32-79,160-207 80-127,208-255",
        (64, 96, 96),
        nics="mlx5_0 mlx5_1 mlx5_8",
        visible=(),
    ),
    "a container on one socket with the GPUs of both": LaunchCase(
        "container", 4, "4-5 6-7 8-9 10-11", [2] * 4, "17 65 ca e3", warned=(2, 3), allowed="4-11"
    ),
    "nodes that are not allowed are replaced by the nearest": LaunchCase(
        "dgx_a100",
        8,
        "32-35 36-39 40-43 44-47 96-99 100-103 104-107 108-111",
        nics=NICS_OF_A100,
        warned=range(8),
        allowed="32-47,96-111",
    ),
    "GPUs without a known node are assigned in order": LaunchCase(
        "virtual_gpus", 4, "0-1,8-9 2-3,10-11 4-5,12-13 6-7,14-15"
    ),
    "equally near NICs are assigned in turn": LaunchCase(
        "separate_domains", 4, "12-17 18-23 0-5 6-11", nics="mlx5_ib2 mlx5_ib3 mlx5_ib0 mlx5_ib1"
    ),
    "Ethernet NICs are used without InfiniBand": LaunchCase("roce", 2, "0-3 12-15", nics="mlx5_10 mlx5_1"),
    "a core with a thread switched off": LaunchCase(
        "two_ports", 2, "0-1,4 2-3,6-7", (3, 4), nics="mlx4_0 mlx4_2"
    ),
    "no rank is bound to a node without CPUs": LaunchCase("memory_node", 2, "0-3 4-7", visible=()),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_each_rank_has_what_is_near_its_gpu(launch: LaunchCase) -> None:
    planned = bindings(launch)
    assert [cpu_ranges(binding.cpus) for binding in planned] == launch.cpus.split()
    if launch.threads is not None:
        assert [binding.threads for binding in planned] == list(launch.threads)
    if launch.gpus is not None:
        found = [binding.gpu.name.split(":")[1] if binding.gpu else "-" for binding in planned]
        assert found == launch.gpus.split()
    if launch.nics is not None:
        nics = launch.nics.split()
        assert [binding.nic.name if binding.nic else "-" for binding in planned] == nics
        of_host = [nic.name for nic in host_of(launch.machine).nics if nic.name in nics]
        assert all([nic.name for nic in binding.nics] == of_host for binding in planned)
    assert [rank for rank, binding in enumerate(planned) if binding.warnings] == list(launch.warned)
    assert {binding.mode for binding in planned} == {launch.mode}


def bindings(launch: LaunchCase) -> list[Binding]:
    host = host_of(launch.machine)
    allowed = frozenset(cpu_list(launch.allowed)) if launch.allowed else every_cpu(host)
    visible = [(rank,) if launch.each_sees_one else launch.visible for rank in range(launch.ranks)]
    launched = [LaunchedRank(rank, launch.ranks, allowed, 0, gpus) for rank, gpus in enumerate(visible)]
    return [plan_binding(host, rank, launch.mode) for rank in launched]


def every_cpu(host: Host) -> frozenset[int]:
    return frozenset(cpu for core in host.cores for cpu in core)


def test_if_the_node_of_one_gpu_is_unknown_all_ranks_are_distributed() -> None:
    """Ranks bound by their GPU and ranks bound by their number could overlap. No rank has a warning."""
    host = host_of("separate_domains")
    lost = replace(host, gpus=(replace(host.gpus[0], node=-1), *host.gpus[1:]))
    planned = [plan_binding(lost, LaunchedRank(rank, 4, every_cpu(host))) for rank in range(4)]
    assert [cpu_ranges(binding.cpus) for binding in planned] == ["0-5", "6-11", "12-17", "18-23"]
    assert [binding.warnings for binding in planned] == [()] * 4


@pytest.mark.parametrize("mode", ["numa", "core", "none"])
@pytest.mark.parametrize("ranks_bound_here", [1, 2])
def test_cpus_bound_by_the_launcher_are_not_changed(ranks_bound_here: int, mode: str) -> None:
    """The ranks of a socket share its threads."""
    host = host_of("dgx_a100")
    rank = LaunchedRank(4, 8, frozenset(cpu_list("16-23,144-147")), ranks_bound_here)
    binding = plan_binding(host, rank, mode)
    assert cpu_ranges(binding.cpus) == "16-23,144-147"
    assert binding.threads == 12 // ranks_bound_here
    assert (binding.gpu, binding.nic and binding.nic.name) == (host.gpus[4], "mlx5_6")
    assert bool(binding.warnings) == (mode != "none")


@pytest.mark.parametrize("mode", ["numa", "core", "none"])
@pytest.mark.parametrize("machine", ["bare", "cpu_vm", "dgx_a100"])
def test_allowed_cpus_that_sys_does_not_list_are_used(machine: str, mode: str) -> None:
    """Some containers list CPUs 0 to 3 and run on others."""
    for local_rank in range(2):
        rank = LaunchedRank(local_rank, 2, frozenset({900, 901}), visible_gpus=())
        binding = plan_binding(host_of(machine), rank, mode)
        assert set(binding.cpus) <= {900, 901}
        assert len(binding.cpus) == binding.threads * (2 if mode == "none" else 1) > 0


def random_host(draw: random.Random) -> Host:
    """Return a machine of up to 5 nodes, not all with CPUs, with its threads numbered in either order."""
    threads = draw.choice((1, 2))
    sizes = [draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 5))]
    sizes[draw.randrange(len(sizes))] = draw.randint(1, 9)
    count = sum(sizes)
    neighbours = draw.random() < 0.5
    cores = [
        tuple(
            range(threads * core, threads * (core + 1)) if neighbours else range(core, threads * count, count)
        )
        for core in range(count)
    ]
    of_nodes = [cores[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    nodes = {node: tuple(sorted(chain(*of_node))) for node, of_node in enumerate(of_nodes)}
    far = {one: {other: 10 + 10 * abs(one - other) for other in nodes} for one in nodes}
    nodes_known = draw.random() < 0.8
    gpus = []
    for number in range(draw.choice((0, 0, 1, 2, 4))):
        node = draw.choice(list(nodes)) if nodes_known else -1
        address = f"0000:{number:02x}:00.0"
        gpus.append(Device(name=address, path=random_path(draw, address), node=node))
    nics = []
    for number in range(draw.randint(0, 3)):
        path = random_path(draw, f"0000:{90 + number:02x}:00.0")
        node = draw.choice([*nodes, -1])
        nics.append(Nic(name=f"mlx5_{number}", path=path, node=node, port=1, interface=""))
    return Host(cores=tuple(cores), nodes=nodes, distances=far, gpus=tuple(gpus), nics=tuple(nics))


def random_path(draw: random.Random, address: str) -> tuple[str, ...]:
    bridge, port = draw.choice(("20", "40", "60")), draw.choice(("01.0", "02.0"))
    return f"pci0000:{bridge}", f"0000:{bridge}:{port}", address


def random_launch(draw: random.Random, host: Host) -> list[LaunchedRank]:
    """Return the local ranks of a launch: any number, any CPUs, and any GPUs or one GPU for each rank."""
    cpus = sorted(cpu for cpus in host.nodes.values() for cpu in cpus)
    if draw.random() < 0.5:
        cpus = draw.sample(cpus, draw.randint(1, len(cpus)))
    allowed, gpus = frozenset(cpus), len(host.gpus)
    if gpus > 1 and draw.random() < 0.25:
        return [LaunchedRank(rank, gpus, allowed, visible_gpus=(rank,)) for rank in range(gpus)]
    ranks = draw.randint(1, 9)
    shown = draw.sample(range(gpus), draw.randint(0, gpus))
    # That all ranks see the same one of several GPUs is not supported: no rank can know what the others see.
    visible = None if draw.random() < 0.5 or len(shown) == 1 < ranks else tuple(shown)
    return [LaunchedRank(rank, ranks, allowed, visible_gpus=visible) for rank in range(ranks)]


def random_machines() -> Iterator[tuple[int, Host, list[LaunchedRank], list[Binding]]]:
    for seed in range(250):
        draw = random.Random(seed)
        host = random_host(draw)
        launched = random_launch(draw, host)
        yield seed, host, launched, [plan_binding(host, rank) for rank in launched]


def test_ranks_divide_the_allowed_cores_of_their_nodes() -> None:
    """Cores are not divided, are shared only where there are too few, and none of a rank's node is unused."""
    shared = 0
    for seed, host, launched, planned in random_machines():
        used = {cpu for binding in planned for cpu in binding.cpus}
        homes = [set(cpus) for cpus in host.nodes.values() if used & set(cpus)]
        assert used == set().union(*homes) & launched[0].allowed_cpus, seed
        for core in host.cores:
            owners = [binding for binding in planned if set(core) & set(binding.cpus)]
            assert all(set(core) & launched[0].allowed_cpus <= set(owner.cpus) for owner in owners), seed
            if len(owners) > 1:
                shared += 1
                (cpus,) = {owner.cpus for owner in owners}
                assert sum(1 for other in host.cores if set(other) & set(cpus)) < len(owners), seed
                assert {owner.threads for owner in owners} == {max(1, len(cpus) // len(owners))}, seed
    assert shared > 20


def test_ranks_are_bound_to_the_node_of_their_gpu_or_have_a_warning() -> None:
    moved = stayed = 0
    for seed, host, launched, planned in random_machines():
        for binding in planned:
            crowded = sum(other.cpus == binding.cpus for other in planned) > 1
            home = set(host.nodes[binding.gpu.node]) if binding.gpu and binding.gpu.node >= 0 else None
            if home is None:
                assert bool(binding.warnings) == crowded, seed
            elif home & launched[0].allowed_cpus:
                stayed += 1
                assert set(binding.cpus) <= home, seed
                assert bool(binding.warnings) == crowded, seed
            else:
                moved += 1
                assert binding.warnings, seed
    assert stayed > 100
    assert moved > 20


def test_all_ranks_have_allowed_cpus_in_each_mode_and_compute_the_same_nics() -> None:
    for seed, host, launched, planned in random_machines():
        for rank in launched:
            for mode in ("numa", "core", "none"):
                binding = plan_binding(host, rank, mode)
                assert binding.cpus == tuple(sorted(set(binding.cpus) & rank.allowed_cpus)) != (), seed
                assert binding.threads >= 1, seed
        assert len({binding.nics for binding in planned}) == 1, seed
        assigned = {binding.nic for binding in planned}
        assert list(planned[0].nics) == [nic for nic in host.nics if nic in assigned], seed
        assert (None in assigned) == (not host.nics), seed
