"""Properties of the binding on random machines: disjoint CPUs, none empty, and all ranks agree."""

from __future__ import annotations

import random
from collections.abc import Iterator

from horovod_volo.cluster.binding import LaunchedRank, plan_binding
from horovod_volo.cluster.topology import Device, Host, Nic


def random_host(draw: random.Random) -> Host:
    """Return a machine of up to 5 nodes, not all with CPUs, with its threads numbered in either order."""
    threads_per_core = draw.choice((1, 2))
    sizes = [draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 5))]
    sizes[draw.randrange(len(sizes))] = draw.randint(1, 9)
    count = sum(sizes)
    neighbours = draw.random() < 0.5
    cores: list[tuple[int, ...]] = []
    nodes: dict[int, tuple[int, ...]] = {}
    for node, size in enumerate(sizes):
        of_node = [
            tuple(
                core * threads_per_core + thread if neighbours else core + thread * count
                for thread in range(threads_per_core)
            )
            for core in range(len(cores), len(cores) + size)
        ]
        cores += of_node
        nodes[node] = tuple(sorted(cpu for core in of_node for cpu in core))
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
        return [
            LaunchedRank(local_rank=r, local_size=gpus, allowed_cpus=allowed, visible_gpus=(r,))
            for r in range(gpus)
        ]
    ranks = draw.randint(1, 9)
    shown = draw.sample(range(gpus), draw.randint(0, gpus))
    # That all ranks see the same one of several GPUs is not supported: no rank can know what the others see.
    visible = None if draw.random() < 0.5 or len(shown) == 1 < ranks else tuple(shown)
    return [
        LaunchedRank(local_rank=r, local_size=ranks, allowed_cpus=allowed, visible_gpus=visible)
        for r in range(ranks)
    ]


def random_machines() -> Iterator[tuple[int, Host, list[LaunchedRank]]]:
    for seed in range(250):
        draw = random.Random(seed)
        host = random_host(draw)
        yield seed, host, random_launch(draw, host)


def test_ranks_divide_the_allowed_cores_of_their_nodes() -> None:
    """Cores are not divided, are shared only where there are too few, and none of a rank's node is unused."""
    shared = 0
    for seed, host, launched in random_machines():
        planned = [plan_binding(host, rank) for rank in launched]
        used = {cpu for binding in planned for cpu in binding.cpus}
        homes = [set(cpus) for cpus in host.nodes.values() if used & set(cpus)]
        assert used == set().union(*homes) & launched[0].allowed_cpus, seed
        for core in host.cores:
            owners = [binding for binding in planned if set(core) & set(binding.cpus)]
            assert all(set(core) & launched[0].allowed_cpus <= set(owner.cpus) for owner in owners), seed
            if len(owners) > 1:
                shared += 1
                assert {owner.cpus for owner in owners} == {owners[0].cpus}, seed
                assert sum(1 for other in host.cores if set(other) & set(owners[0].cpus)) < len(owners), seed
                assert {owner.threads for owner in owners} == {max(1, len(owners[0].cpus) // len(owners))}, (
                    seed
                )
    assert shared > 20


def test_ranks_are_bound_to_the_node_of_their_gpu_or_have_a_warning() -> None:
    moved = stayed = 0
    for seed, host, launched in random_machines():
        planned = [plan_binding(host, rank) for rank in launched]
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
    for seed, host, launched in random_machines():
        planned = [plan_binding(host, rank) for rank in launched]
        for rank in launched:
            for mode in ("numa", "core", "none"):
                binding = plan_binding(host, rank, mode)
                assert binding.cpus == tuple(sorted(set(binding.cpus) & rank.allowed_cpus)) != (), seed
                assert binding.threads >= 1, seed
        assert len({binding.nics for binding in planned}) == 1, seed
        assigned = {binding.nic for binding in planned}
        assert list(planned[0].nics) == [nic for nic in host.nics if nic in assigned], seed
        assert (None in assigned) == (not host.nics), seed
