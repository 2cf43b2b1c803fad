"""Cores, NUMA nodes, GPUs and NICs read from /sys, and the distances between them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from topologies_on_disk import host_of, lay_out

from horovod_volo.cluster.topology import Host, Nic, cpu_list, cpu_ranges, distance, read_host


def nic(host: Host, name: str) -> Nic:
    return next(nic for nic in host.nics if nic.name == name)


LISTS = {"0-3,8": (0, 1, 2, 3, 8), "5": (5,), "0,2,4": (0, 2, 4), "0-1,48-49": (0, 1, 48, 49), "": ()}


@pytest.mark.parametrize(("text", "cpus"), LISTS.items())
def test_lists_of_cpus_have_the_format_of_the_kernel(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(f"{text}\n") == cpus
    assert cpu_ranges(reversed(cpus)) == text


@pytest.mark.parametrize(
    ("machine", "nics"),
    [
        ("dgx_a100", "mlx5_0@3 mlx5_1@3 mlx5_2@1 mlx5_3@1 mlx5_6@7 mlx5_7@7 mlx5_8@5 mlx5_9@5"),
        ("dgx_2", "mlx5_0@0 mlx5_1@0 mlx5_2@0 mlx5_3@0 mlx5_6@1 mlx5_7@1 mlx5_8@1 mlx5_9@1"),
        ("bare", ""),
        ("separate_domains", "mlx5_ib0@0 mlx5_ib1@0 mlx5_ib2@1 mlx5_ib3@1"),
        ("roce", "mlx5_1@2 mlx5_2@0 mlx5_3@0 mlx5_4@1 mlx5_10@0"),
        ("two_ports", "mlx4_0@0 mlx4_2@0"),
    ],
)
def test_nics_with_an_active_port_are_listed_in_natural_order(machine: str, nics: str) -> None:
    """Only InfiniBand if any of its ports is active, otherwise Ethernet."""
    assert [f"{nic.name}@{nic.node}" for nic in host_of(machine).nics] == nics.split()


def test_nics_have_their_port_and_interface() -> None:
    dgx = host_of("dgx_a100")
    assert (nic(dgx, "mlx5_6").port, nic(dgx, "mlx5_6").interface) == (1, "ib6")
    assert nic(host_of("roce"), "mlx5_10").interface == "enp39s0np0"
    old = host_of("two_ports")
    assert (nic(old, "mlx4_0").port, nic(old, "mlx4_0").interface) == (2, "ib1")
    assert (nic(old, "mlx4_2").port, nic(old, "mlx4_2").interface) == (1, "")


def test_a_shared_switch_is_nearer_than_a_root_bridge_a_node_a_socket() -> None:
    host = host_of("roce")
    names = ("mlx5_10", "mlx5_3", "mlx5_2", "mlx5_4", "mlx5_1")
    far = [distance(host, host.gpus[0], nic(host, name)) for name in names]
    assert far == sorted(set(far))


def remove(path: Path) -> None:
    """Remove a file or folder, which must exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize(
    "missing",
    [
        "sys/devices/system/cpu/online",
        "sys/devices/system/node",
        "sys/devices/system/node/node1/cpulist",
        "sys/devices/system/cpu/cpu3/topology",
        "sys/bus/pci/devices/0000:23:00.0",
        "sys/devices/pci0000:20/0000:20:01.1/0000:21:00.0/0000:22:00.0/0000:23:00.0/numa_node",
        "sys/class",
        "sys/class/infiniband/mlx5_2/device",
        "sys/class/infiniband/mlx5_2/ports/1/state",
        "sys/devices/pci0000:00/0000:00:03.1/0000:01:00.0/net",
    ],
)
def test_if_a_file_is_missing_the_others_are_read(tmp_path: Path, missing: str) -> None:
    root, gpus = lay_out("roce", tmp_path)
    remove(root / missing)
    host = read_host(root, gpus)
    assert host.cores == tuple((cpu,) for cpu in range(16))
    assert [gpu.name for gpu in host.gpus] == ["0000:23:00.0", "0000:c1:00.0"]


def test_a_gpu_that_linux_does_not_list_has_no_path(tmp_path: Path) -> None:
    root, _ = lay_out("bare", tmp_path)
    (gpu,) = read_host(root, [("00000000:AF:00.0", "GPU-af")]).gpus
    assert (gpu.name, gpu.node, gpu.path) == ("0000:af:00.0", -1, ())


@pytest.mark.skipif(not shutil.which("lscpu"), reason="lscpu is not installed")
def test_this_machine_is_read_as_by_lscpu() -> None:
    table = subprocess.run(
        ["lscpu", "--parse=CPU,SOCKET,CORE,NODE"], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    cores: dict[tuple[str, str], list[int]] = defaultdict(list)
    nodes: dict[int, list[int]] = defaultdict(list)
    for row in (line.split(",") for line in table.splitlines() if line and not line.startswith("#")):
        cores[row[1], row[2]].append(int(row[0]))
        nodes[int(row[3] or 0)].append(int(row[0]))
    host = read_host()
    assert sorted(host.cores) == sorted(tuple(sorted(core)) for core in cores.values())
    assert {node: set(cpus) for node, cpus in host.nodes.items() if cpus} == {
        node: set(cpus) for node, cpus in nodes.items()
    }


def test_binding_imports_no_torch() -> None:
    """A rank binds itself before it imports torch, which starts threads."""
    program = "import sys, horovod_volo.cluster.pinning; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
