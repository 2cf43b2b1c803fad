"""The CPUs, memory nodes, GPU and NIC of each rank on real machines, against values computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from topologies_on_disk import host_of

from horovod_volo.cluster.binding import Binding, LaunchedRank, plan_binding
from horovod_volo.cluster.topology import Host, cpu_list, cpu_ranges, read_host

HDR_NICS = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9")


def bindings(
    machine: str,
    ranks: int,
    mode: str = "numa",
    *,
    allowed: str | None = None,
    visible: tuple[int, ...] | None = None,
) -> list[Binding]:
    """Plan the bindings of a machine's local ranks; all CPUs are allowed unless `allowed` lists some."""
    host = host_of(machine)
    cpus = every_cpu(host) if allowed is None else frozenset(cpu_list(allowed))
    launched = [
        LaunchedRank(local_rank=r, local_size=ranks, allowed_cpus=cpus, visible_gpus=visible)
        for r in range(ranks)
    ]
    return [plan_binding(host, rank, mode) for rank in launched]


def bindings_with_one_visible_gpu(machine: str, ranks: int) -> list[Binding]:
    """Plan the binding of each local rank where the scheduler shows rank r only GPU r."""
    host = host_of(machine)
    return [
        plan_binding(
            host,
            LaunchedRank(local_rank=r, local_size=ranks, allowed_cpus=every_cpu(host), visible_gpus=(r,)),
        )
        for r in range(ranks)
    ]


def every_cpu(host: Host) -> frozenset[int]:
    return frozenset(cpu for core in host.cores for cpu in core)


def cpus_of(planned: Sequence[Binding]) -> list[str]:
    return [cpu_ranges(binding.cpus) for binding in planned]


def nodes_of(planned: Sequence[Binding]) -> list[tuple[int, ...]]:
    return [binding.memory_nodes for binding in planned]


def gpus_of(planned: Sequence[Binding]) -> list[str]:
    return [binding.gpu.name if binding.gpu else "none" for binding in planned]


def nics_of(planned: Sequence[Binding]) -> list[str]:
    return [binding.nic.name if binding.nic else "none" for binding in planned]


def threads_of(planned: Sequence[Binding]) -> list[int]:
    return [binding.threads for binding in planned]


def all_have(planned: Sequence[Binding], *, background: tuple[int, ...], nics: Sequence[str]) -> bool:
    """Return whether all ranks compute the same background CPUs and NICs for the host."""
    return all(
        (binding.background_cpus, [nic.name for nic in binding.nics]) == (background, list(nics))
        for binding in planned
    )


EIGHT_A100 = (
    ("0000:07:00.0", "48-55,176-183", 3, "mlx5_0"),
    ("0000:0f:00.0", "56-63,184-191", 3, "mlx5_1"),
    ("0000:47:00.0", "16-23,144-151", 1, "mlx5_2"),
    ("0000:4e:00.0", "24-31,152-159", 1, "mlx5_3"),
    ("0000:87:00.0", "112-119,240-247", 7, "mlx5_6"),
    ("0000:90:00.0", "120-127,248-255", 7, "mlx5_7"),
    ("0000:b7:00.0", "80-87,208-215", 5, "mlx5_8"),
    ("0000:bd:00.0", "88-95,216-223", 5, "mlx5_9"),
)


def test_eight_ranks_of_a_dgx_a100() -> None:
    planned = bindings("dgx_a100", 8)
    assert list(
        zip(gpus_of(planned), cpus_of(planned), nodes_of(planned), nics_of(planned), strict=True)
    ) == [(gpu, cpus, (node,), nic) for gpu, cpus, node, nic in EIGHT_A100]
    assert threads_of(planned) == [16] * 8
    assert all_have(planned, background=(183, 191, 151, 159, 247, 255, 215, 223), nics=HDR_NICS)
    assert [(binding.mode, binding.warnings) for binding in planned] == [("numa", ())] * 8


def test_eight_ranks_that_each_see_one_gpu_have_the_same_bindings() -> None:
    planned = bindings_with_one_visible_gpu("dgx_a100", 8)
    assert list(
        zip(gpus_of(planned), cpus_of(planned), nodes_of(planned), nics_of(planned), strict=True)
    ) == [(gpu, cpus, (node,), nic) for gpu, cpus, node, nic in EIGHT_A100]
    assert [[nic.name for nic in binding.nics] for binding in planned] == [list(HDR_NICS)] * 8
    assert threads_of(planned) == [16] * 8


def test_two_ranks_of_a_dgx_a100_have_the_first_two_gpus() -> None:
    planned = bindings("dgx_a100", 2)
    assert gpus_of(planned) == ["0000:07:00.0", "0000:0f:00.0"]
    assert cpus_of(planned) == ["48-55,176-183", "56-63,184-191"]
    assert nodes_of(planned) == [(3,), (3,)]
    assert nics_of(planned) == ["mlx5_0", "mlx5_1"]
    assert all_have(planned, background=(183, 191), nics=["mlx5_0", "mlx5_1"])


def test_one_rank_of_a_dgx_a100_has_its_gpus_node() -> None:
    planned = bindings("dgx_a100", 1)
    assert gpus_of(planned) == ["0000:07:00.0"]
    assert cpus_of(planned) == ["48-63,176-191"]
    assert nodes_of(planned) == [(3,)]
    assert threads_of(planned) == [32]
    assert nics_of(planned) == ["mlx5_0"]
    assert all_have(planned, background=(191,), nics=["mlx5_0"])


def test_ranks_have_the_gpus_that_cuda_shows_in_its_order() -> None:
    last_two = bindings("dgx_a100", 2, visible=(7, 6))
    assert gpus_of(last_two) == ["0000:bd:00.0", "0000:b7:00.0"]
    assert cpus_of(last_two) == ["80-87,208-215", "88-95,216-223"]
    assert nics_of(last_two) == ["mlx5_8", "mlx5_9"]
    apart = bindings("dgx_a100", 2, visible=(1, 4))
    assert gpus_of(apart) == ["0000:0f:00.0", "0000:87:00.0"]
    assert cpus_of(apart) == ["48-63,176-191", "112-127,240-255"]
    assert all_have(apart, background=(191, 255), nics=["mlx5_0", "mlx5_6"])


def test_more_gpus_than_ranks_leave_the_last_ones_unused() -> None:
    assert gpus_of(bindings("dgx_a100", 2, visible=(5, 3, 0))) == ["0000:90:00.0", "0000:4e:00.0"]


def test_fewer_gpus_than_ranks_are_not_assigned() -> None:
    """Three ranks with two GPUs are bound as if there were no GPU."""
    planned = bindings("container", 3, visible=(0, 1))
    assert gpus_of(planned) == ["none"] * 3
    assert cpus_of(planned) == ["0-7,32-39", "8-15,40-47", "16-31,48-63"]
    assert nodes_of(planned) == [(0,), (0,), (1,)]


def test_a_rank_that_sees_one_gpu_leaves_cpus_to_the_other_ranks() -> None:
    """One of two ranks has the second GPU of node 7; the other rank is assumed to have the first."""
    host = host_of("dgx_a100")
    rank = LaunchedRank(local_rank=1, local_size=2, allowed_cpus=every_cpu(host), visible_gpus=(5,))
    binding = plan_binding(host, rank)
    assert binding.gpu == host.gpus[5]
    assert (cpu_ranges(binding.cpus), binding.memory_nodes) == ("120-127,248-255", (7,))


def test_no_more_ranks_are_assumed_than_there_are() -> None:
    """Node 0 of a DGX-2 has eight GPUs, but with only two ranks each has half of the node."""
    planned = bindings_with_one_visible_gpu("dgx_2", 2)
    assert cpus_of(planned) == ["0-11,48-59", "12-23,60-71"]
    assert nics_of(planned) == ["mlx5_0", "mlx5_0"]


def test_one_rank_that_sees_one_gpu_has_the_node_for_itself() -> None:
    (binding,) = bindings("dgx_a100", 1, visible=(5,))
    assert cpu_ranges(binding.cpus) == "112-127,240-255"


def test_mode_core_takes_one_thread_of_each_core() -> None:
    planned = bindings("dgx_a100", 8, "core")
    assert cpus_of(planned) == ["48-55", "56-63", "16-23", "24-31", "112-119", "120-127", "80-87", "88-95"]
    assert threads_of(planned) == [8] * 8
    assert nodes_of(planned) == [(3,), (3,), (1,), (1,), (7,), (7,), (5,), (5,)]
    assert all_have(planned, background=(55, 63, 23, 31, 119, 127, 87, 95), nics=HDR_NICS)
    assert [binding.mode for binding in planned] == ["core"] * 8


def test_mode_core_takes_the_first_allowed_thread() -> None:
    (binding,) = bindings("dgx_a100", 1, "core", allowed="48-51,176-183")
    assert cpu_ranges(binding.cpus) == "48-51,180-183"


def test_cores_are_not_divided_whichever_of_their_threads_are_allowed() -> None:
    planned = bindings("dgx_a100", 2, allowed="48-51,176-183")
    assert cpus_of(planned) == ["48-51,176-179", "180-183"]
    assert threads_of(planned) == [8, 4]
    assert all_have(planned, background=(179, 183), nics=["mlx5_0", "mlx5_1"])


def test_mode_none_changes_no_cpus_but_has_gpu_and_nic() -> None:
    planned = bindings("dgx_a100", 8, "none")
    assert cpus_of(planned) == ["0-255"] * 8
    assert nodes_of(planned) == [()] * 8
    assert threads_of(planned) == [32] * 8
    assert gpus_of(planned) == [gpu for gpu, _, _, _ in EIGHT_A100]
    assert nics_of(planned) == list(HDR_NICS)
    assert all_have(planned, background=(), nics=HDR_NICS)
    assert [binding.mode for binding in planned] == ["none"] * 8


def test_mode_none_divides_the_allowed_threads_with_at_least_one_for_each_rank() -> None:
    assert threads_of(bindings("cpu_vm", 3, "none", allowed="0-6")) == [2, 2, 2]
    assert threads_of(bindings("cpu_vm", 5, "none", allowed="2-4")) == [1] * 5


def test_sixteen_ranks_of_a_dgx_2() -> None:
    planned = bindings("dgx_2", 16)
    assert cpus_of(planned) == [
        "0-2,48-50",
        "3-5,51-53",
        "6-8,54-56",
        "9-11,57-59",
        "12-14,60-62",
        "15-17,63-65",
        "18-20,66-68",
        "21-23,69-71",
        "24-26,72-74",
        "27-29,75-77",
        "30-32,78-80",
        "33-35,81-83",
        "36-38,84-86",
        "39-41,87-89",
        "42-44,90-92",
        "45-47,93-95",
    ]
    assert nodes_of(planned) == [(0,)] * 8 + [(1,)] * 8
    assert threads_of(planned) == [6] * 16
    background = (50, 53, 56, 59, 62, 65, 68, 71, 74, 77, 80, 83, 86, 89, 92, 95)
    assert all_have(planned, background=background, nics=HDR_NICS)


def test_two_gpus_of_a_dgx_2_share_the_nic_of_their_switch() -> None:
    pairs = "mlx5_0 mlx5_0 mlx5_1 mlx5_1 mlx5_2 mlx5_2 mlx5_3 mlx5_3"
    more = "mlx5_6 mlx5_6 mlx5_7 mlx5_7 mlx5_8 mlx5_8 mlx5_9 mlx5_9"
    assert nics_of(bindings("dgx_2", 16)) == f"{pairs} {more}".split()


def test_ranks_with_fewer_than_four_cpus_have_no_background_cpu() -> None:
    assert all_have(bindings("dgx_2", 16, "core"), background=(), nics=HDR_NICS)


def test_a_workstation_is_used_completely_without_a_memory_policy() -> None:
    planned = bindings("workstation", 1)
    assert gpus_of(planned) == ["0000:01:00.0"]
    assert cpus_of(planned) == ["0-15"]
    assert nodes_of(planned) == [()]
    assert threads_of(planned) == [16]
    assert nics_of(planned) == ["none"]
    assert all_have(planned, background=(15,), nics=[])
    assert cpus_of(bindings("workstation", 1, "core")) == ["0,2,4,6,8,10,12,14"]


def test_all_ranks_have_the_only_gpu_of_a_machine() -> None:
    planned = bindings("workstation", 3)
    assert gpus_of(planned) == ["0000:01:00.0"] * 3
    assert cpus_of(planned) == ["0-3", "4-9", "10-15"]


@pytest.mark.parametrize(
    ("ranks", "cpus", "nodes"),
    [
        (1, ["0-7"], [()]),
        (2, ["0-3", "4-7"], [(0,), (1,)]),
        (3, ["0-1", "2-3", "4-7"], [(0,), (0,), (1,)]),
        (5, ["0", "1", "2-3", "4-5", "6-7"], [(0,), (0,), (0,), (1,), (1,)]),
        (8, ["0", "1", "2", "3", "4", "5", "6", "7"], [(0,)] * 4 + [(1,)] * 4),
    ],
)
def test_without_gpus_ranks_are_distributed_over_the_nodes(
    ranks: int, cpus: list[str], nodes: list[tuple[int, ...]]
) -> None:
    planned = bindings("cpu_vm", ranks)
    assert cpus_of(planned) == cpus
    assert nodes_of(planned) == nodes
    assert threads_of(planned) == [len(cpu_list(text)) for text in cpus]
    assert gpus_of(planned) == nics_of(planned) == ["none"] * ranks
    assert [binding.warnings for binding in planned] == [()] * ranks


def test_ranks_of_a_node_without_enough_cores_share_all_of_it() -> None:
    planned = bindings("cpu_vm", 9)
    assert cpus_of(planned) == ["0-3"] * 5 + ["4", "5", "6", "7"]
    assert threads_of(planned) == [1] * 9
    assert [bool(binding.warnings) for binding in planned] == [True] * 5 + [False] * 4


def test_sharing_ranks_divide_the_threads() -> None:
    """The two hardware threads of a core are not divided: both ranks may use both, with one thread each."""
    planned = bindings("workstation", 2, allowed="6-7", visible=())
    assert cpus_of(planned) == ["6-7", "6-7"]
    assert threads_of(planned) == [1, 1]
    assert all(binding.warnings for binding in planned)


@pytest.mark.parametrize(
    ("ranks", "background"),
    [(1, (7,)), (2, (3, 7)), (3, ()), (4, ()), (9, ()), (16, ())],
)
def test_background_cpus_are_for_all_ranks_or_none(ranks: int, background: tuple[int, ...]) -> None:
    """None if a rank has few CPUs, and none if ranks share a node, because they would share one CPU."""
    assert all_have(bindings("cpu_vm", ranks), background=background, nics=[])


@pytest.mark.parametrize(
    ("allowed", "ranks", "cpus", "nodes"),
    [
        ("2-5", 2, ["2-3", "4-5"], [(0,), (1,)]),
        ("5-7", 1, ["5-7"], [(1,)]),
        ("5-7", 2, ["5", "6-7"], [(1,), (1,)]),
        ("3-7", 3, ["3", "3", "4-7"], [(0,), (0,), (1,)]),
    ],
)
def test_only_allowed_cpus_are_distributed(
    allowed: str, ranks: int, cpus: list[str], nodes: list[tuple[int, ...]]
) -> None:
    planned = bindings("cpu_vm", ranks, allowed=allowed)
    assert cpus_of(planned) == cpus
    assert nodes_of(planned) == nodes


def test_fewer_ranks_than_nodes_have_several_nodes_each() -> None:
    planned = bindings("dgx_a100", 3, visible=())
    assert cpus_of(planned) == ["0-31,128-159", "32-79,160-207", "80-127,208-255"]
    assert nodes_of(planned) == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert threads_of(planned) == [64, 96, 96]
    assert gpus_of(planned) == ["none"] * 3


def test_without_a_gpu_the_nic_is_near_the_first_node() -> None:
    """Nodes 0 and 2 have no NIC, but their socket has four: the first two ranks have different ones."""
    planned = bindings("dgx_a100", 3, visible=())
    assert nics_of(planned) == ["mlx5_0", "mlx5_1", "mlx5_8"]
    assert all_have(planned, background=(159, 207, 255), nics=["mlx5_0", "mlx5_1", "mlx5_8"])


def test_a_container_on_one_socket_with_the_gpus_of_both() -> None:
    planned = bindings("container", 4, allowed="4-11")
    assert gpus_of(planned) == ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:e3:00.0"]
    assert cpus_of(planned) == ["4-5", "6-7", "8-9", "10-11"]
    assert nodes_of(planned) == [(0,)] * 4
    assert threads_of(planned) == [2] * 4
    assert [bool(binding.warnings) for binding in planned] == [False, False, True, True]
    assert all_have(planned, background=(), nics=[])


def test_cores_that_do_not_divide_evenly_are_distributed_in_order() -> None:
    assert cpus_of(bindings("container", 3, allowed="4-11")) == ["4-5", "6-8", "9-11"]
    two = bindings("container", 2, allowed="4-11")
    assert cpus_of(two) == ["4-7", "8-11"]
    assert all_have(two, background=(7, 11), nics=[])


def test_ranks_with_gpus_of_nodes_that_are_not_allowed_have_the_nearest_nodes() -> None:
    """Only nodes 2 and 6 are allowed: each has the ranks of its socket's two nodes with GPUs."""
    planned = bindings("dgx_a100", 8, allowed="32-47,96-111")
    assert cpus_of(planned) == ["32-35", "36-39", "40-43", "44-47", "96-99", "100-103", "104-107", "108-111"]
    assert nodes_of(planned) == [(2,)] * 4 + [(6,)] * 4
    assert nics_of(planned) == list(HDR_NICS)
    assert all(binding.warnings for binding in planned)
    assert all_have(planned, background=(35, 39, 43, 47, 99, 103, 107, 111), nics=HDR_NICS)


def test_gpus_without_a_known_node_are_assigned_in_order() -> None:
    planned = bindings("virtual_gpus", 4)
    assert gpus_of(planned) == ["0000:00:04.0", "0000:00:05.0", "0000:00:06.0", "0000:00:07.0"]
    assert cpus_of(planned) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert nodes_of(planned) == [()] * 4
    assert all_have(planned, background=(9, 11, 13, 15), nics=[])


def test_if_the_node_of_one_gpu_is_unknown_all_ranks_are_distributed() -> None:
    """Ranks bound by their GPU and ranks bound by their number could overlap. No rank has a warning."""
    host = host_of("separate_domains")
    lost = replace(host, gpus=(replace(host.gpus[0], node=-1), *host.gpus[1:]))
    planned = [
        plan_binding(lost, LaunchedRank(local_rank=r, local_size=4, allowed_cpus=every_cpu(host)))
        for r in range(4)
    ]
    assert cpus_of(planned) == ["0-5", "6-11", "12-17", "18-23"]
    assert [binding.warnings for binding in planned] == [()] * 4


def test_equally_near_nics_are_assigned_in_turn() -> None:
    planned = bindings("separate_domains", 4)
    assert cpus_of(planned) == ["12-17", "18-23", "0-5", "6-11"]
    assert nics_of(planned) == ["mlx5_ib2", "mlx5_ib3", "mlx5_ib0", "mlx5_ib1"]
    all_nics = ["mlx5_ib0", "mlx5_ib1", "mlx5_ib2", "mlx5_ib3"]
    assert all_have(planned, background=(17, 23, 5, 11), nics=all_nics)


def test_after_the_last_of_the_near_nics_the_first_is_assigned_again() -> None:
    planned = bindings("separate_domains", 6, visible=())
    assert cpus_of(planned) == ["0-3", "4-7", "8-11", "12-15", "16-19", "20-23"]
    assert nics_of(planned) == ["mlx5_ib0", "mlx5_ib1", "mlx5_ib0", "mlx5_ib2", "mlx5_ib3", "mlx5_ib2"]


def test_ethernet_nics_are_used_without_infiniband() -> None:
    planned = bindings("roce", 2)
    assert cpus_of(planned) == ["0-3", "12-15"]
    assert nodes_of(planned) == [(0,), (3,)]
    assert nics_of(planned) == ["mlx5_10", "mlx5_1"]
    assert all_have(planned, background=(3, 15), nics=["mlx5_1", "mlx5_10"])


def test_a_bare_machine_is_one_node_of_single_cores() -> None:
    planned = bindings("bare", 2)
    assert cpus_of(planned) == ["0-1", "2-3"]
    assert nodes_of(planned) == [(), ()]
    assert threads_of(planned) == [2, 2]


def test_a_core_with_a_thread_switched_off_is_one_core() -> None:
    planned = bindings("two_ports", 2)
    assert cpus_of(planned) == ["0-1,4", "2-3,6-7"]
    assert threads_of(planned) == [3, 4]
    assert all_have(planned, background=(), nics=["mlx4_0", "mlx4_2"])


def test_no_rank_is_bound_to_a_node_without_cpus() -> None:
    alone = bindings("memory_node", 1)
    assert (cpus_of(alone), nodes_of(alone)) == (["0-7"], [()])
    two = bindings("memory_node", 2, visible=())
    assert (cpus_of(two), nodes_of(two)) == (["0-3", "4-7"], [(), ()])


@pytest.mark.parametrize("mode", ["numa", "core"])
def test_cpus_bound_by_the_launcher_are_not_changed(mode: str) -> None:
    host = host_of("dgx_a100")
    cpus = frozenset(cpu_list("16-23,144-147"))
    rank = LaunchedRank(local_rank=4, local_size=8, allowed_cpus=cpus, ranks_bound_here=1)
    binding = plan_binding(host, rank, mode)
    assert cpu_ranges(binding.cpus) == "16-23,144-147"
    assert (binding.threads, binding.memory_nodes, binding.background_cpus) == (12, (1,), ())
    assert (binding.gpu, binding.nic and binding.nic.name) == (host.gpus[4], "mlx5_6")
    assert binding.warnings != ()


def test_mode_none_sets_no_memory_policy_for_a_rank_bound_by_the_launcher() -> None:
    rank = LaunchedRank(
        local_rank=4, local_size=8, allowed_cpus=frozenset(cpu_list("16-23,144-147")), ranks_bound_here=1
    )
    binding = plan_binding(host_of("dgx_a100"), rank, "none")
    assert cpu_ranges(binding.cpus) == "16-23,144-147"
    assert (binding.threads, binding.memory_nodes, binding.background_cpus) == (12, (), ())


@pytest.mark.parametrize(
    ("machine", "allowed", "nodes"),
    [
        ("dgx_a100", "0-3,60-63,64", (0, 3, 4)),
        ("cpu_vm", "3-4", ()),
        ("cpu_vm", "4", (1,)),
        ("workstation", "0-1", ()),
        ("bare", "2", ()),
    ],
)
def test_a_rank_bound_by_the_launcher_has_the_memory_of_its_cpus(
    machine: str, allowed: str, nodes: tuple[int, ...]
) -> None:
    rank = LaunchedRank(
        local_rank=0, local_size=2, allowed_cpus=frozenset(cpu_list(allowed)), ranks_bound_here=1
    )
    assert plan_binding(host_of(machine), rank).memory_nodes == nodes


@pytest.mark.parametrize("mode", ["numa", "core", "none"])
@pytest.mark.parametrize("machine", ["bare", "cpu_vm", "dgx_a100"])
def test_allowed_cpus_that_sys_does_not_list_are_used(machine: str, mode: str) -> None:
    """Some containers list CPUs 0 to 3 and run on others."""
    for local_rank in range(2):
        rank = LaunchedRank(
            local_rank=local_rank, local_size=2, allowed_cpus=frozenset({900, 901}), visible_gpus=()
        )
        binding = plan_binding(host_of(machine), rank, mode)
        assert set(binding.cpus) <= {900, 901}
        assert len(binding.cpus) == binding.threads * (2 if mode == "none" else 1) > 0


@pytest.mark.parametrize(("ranks", "cpus"), [(1, ["0-7"]), (2, ["0-3", "4-7"]), (3, ["0-1", "2-4", "5-7"])])
def test_without_sys_the_allowed_cpus_are_distributed(tmp_path: Path, ranks: int, cpus: list[str]) -> None:
    """A chroot in which /sys is not mounted does not list the CPUs that the process runs on."""
    host, allowed = read_host(tmp_path), frozenset(range(8))
    planned = [
        plan_binding(host, LaunchedRank(local_rank=r, local_size=ranks, allowed_cpus=allowed))
        for r in range(ranks)
    ]
    assert cpus_of(planned) == cpus
    assert nodes_of(planned) == [()] * ranks
    assert threads_of(planned) == [len(cpu_list(text)) for text in cpus]
