"""Cores, NUMA nodes, GPUs and NICs read from /sys, and the inputs and effects of a binding to them."""

import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pynvml import NVMLError
from topologies_on_disk import host_of, lay_out

from horovod_volo.cluster import pinning, topology
from horovod_volo.cluster.binding import Binding, LaunchedRank, plan_binding
from horovod_volo.cluster.launch_env import ALONE, LaunchEnv, read_launch_env
from horovod_volo.cluster.topology import (
    Device,
    Host,
    Nic,
    cpu_ranges,
    distance,
    driver_versions,
    kernel_address,
    list_gpus,
    read_host,
)
from horovod_volo.cluster.world import World, rank_resources


def nic(host: Host, name: str) -> Nic:
    return next(nic for nic in host.nics if nic.name == name)


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
    path = root / missing
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    host = read_host(root, gpus)
    assert host.cores == tuple((cpu,) for cpu in range(16))
    assert [gpu.name for gpu in host.gpus] == ["0000:23:00.0", "0000:c1:00.0"]


def test_a_gpu_that_linux_does_not_list_has_no_path(tmp_path: Path) -> None:
    root, _ = lay_out("bare", tmp_path)
    (gpu,) = read_host(root, [("00000000:AF:00.0", "GPU-af")]).gpus
    assert (gpu.name, gpu.node, gpu.path) == ("0000:af:00.0", -1, ())


@pytest.mark.skipif(not shutil.which("lscpu"), reason="lscpu is not installed")
def test_this_machine_is_read_as_by_lscpu() -> None:
    command = ["lscpu", "--parse=CPU,SOCKET,CORE,NODE"]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    cores, nodes = defaultdict(set), defaultdict(set)
    for line in table.splitlines():
        if line and not line.startswith("#"):
            cpu, *core, node = line.split(",")
            cores[tuple(core)].add(int(cpu))
            nodes[int(node or 0)].add(int(cpu))
    host = read_host()
    assert sorted(host.cores) == sorted(tuple(sorted(core)) for core in cores.values())
    assert {node: set(cpus) for node, cpus in host.nodes.items() if cpus} == nodes


GPUS = [(f"00000000:{bus}:00.0", f"GPU-{bus}{bus}-aaaa") for bus in ("07", "0F", "47", "4E")]
NICS = tuple(Nic(f"mlx5_{number}", (), 0, interface=f"ib{number}") for number in range(2))


def binding(gpu: Device | None = None, nics: tuple[Nic, ...] = ()) -> Binding:
    return Binding("numa", (4, 5, 6, 7), gpu, nics[-1] if nics else None, nics, threads=4)


ALWAYS = {
    "OMP_NUM_THREADS": "4",
    "MKL_NUM_THREADS": "4",
    "OPENBLAS_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def test_variables_of_a_rank_with_a_gpu_and_a_nic() -> None:
    chosen = binding(Device("0000:07:00.0", (), 1), NICS)
    assert pinning.launch_env_vars(chosen) == ALWAYS | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "UCX_NET_DEVICES": "mlx5_1:1",
        "HOROVOD_GLOO_IFACE": "ib1",
        "HOROVOD_FUSION_THRESHOLD": "0",
    }


def test_variables_of_a_rank_without_gpu_and_nic() -> None:
    assert pinning.launch_env_vars(binding())["HOROVOD_CYCLE_TIME"] == "10"
    changing = pinning.launch_env_vars(binding(), is_alone=True, ranks_change=True)  # no HOROVOD_CYCLE_TIME
    assert changing == ALWAYS | {"OMP_WAIT_POLICY": "PASSIVE", "HOROVOD_FUSION_THRESHOLD": "0"}
    assert pinning.launch_env_vars(binding(), is_alone=True, autotunes=True) == ALWAYS


def test_variables_that_are_set_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"})
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    assert pinning.bind("none").warnings[0].startswith("OMP_NUM_THREADS is set: torch computes with 7, not ")
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")
    assert [os.environ[name] for name in names] == ["7", "ACTIVE", "1"]


@pytest.mark.parametrize(
    ("set_to", "threads"), [(None, 4), ("", 4), ("7", 7), ("2,3", 2), (" 1 ", 1), ("0", 4), ("many", 4)]
)
def test_a_number_of_threads_that_is_set_is_respected(set_to, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_to)
    assert pinning.compute_threads(default=4) == threads
    before = torch.get_num_threads()
    rank_resources(World(binding=binding()), "cpu")
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == threads


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, None),
        ("", ()),
        ("2,0", (2, 0)),
        ("GPU-4747-aaaa", (2,)),
        ("GPU-07", (0,)),
        ("GPU-0,1", ()),  # an ambiguous prefix: CUDA ignores it and all that follow
        ("1,7,2", (1,)),  # a number that does not exist has the same effect
        ("MIG-1234", None),
    ],
)
def test_cuda_visible_devices_are_read_as_by_cuda(setting: str | None, shown: tuple[int, ...] | None) -> None:
    on_host = tuple(Device(kernel_address(address), (), 0) for address, _ in GPUS)
    host = Host(cores=(), nodes={}, distances={}, gpus=on_host, nics=())
    assert pinning.visible_gpus(host, GPUS, setting) == shown


def test_gpus_that_a_cgroup_hides_count_as_those_of_other_ranks(tmp_path: Path) -> None:
    """Slurm's cgroup shows each task one GPU; the PCI bus lists all of them."""
    root, gpus = lay_out("dgx_a100", tmp_path)
    host = read_host(root, gpus[5:6])
    assert [gpu.name for gpu in host.gpus] == [gpu.name for gpu in read_host(root, gpus).gpus]
    assert pinning.visible_gpus(host, gpus[5:6], None) == (5,)
    assert pinning.visible_gpus(host, gpus[5:6], "0") == (5,)
    rank = LaunchedRank(local_rank=5, local_size=8, allowed_cpus=frozenset(range(256)), visible_gpus=(5,))
    assert cpu_ranges(plan_binding(host, rank).cpus) == "120-127,248-255"  # the second half of node 7
    assert pinning.visible_gpus(read_host(root, gpus), gpus, None) is None


def process(proc: Path, number: str, name: str, parent: str, cpus: str) -> None:
    folder = proc / number
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nCpus_allowed_list:\t{cpus}\n")


@pytest.mark.parametrize(
    ("launcher", "launcher_cpus", "rank_cpus", "placed"),
    [
        ("orted", "0-63", "0-7", 1),
        ("mpirun.openmpi", "0-63", "0-7", 1),
        ("orted", "0-63", "0-31", 4),  # by socket: four of the eight ranks have these CPUs
        ("orted", "0-7", "0-7", 0),  # a job's cgroup, or taskset: all ranks have these CPUs
        ("bash", "0-63", "0-7", 0),  # taskset before horovodrun
        ("slurmstepd", "0-63", "0-1", 1),
        ("slurmstepd", "0-63", "0-15", 0),  # the 16 CPUs of the job, to which stepd itself is not bound
    ],
)
def test_the_launcher_bound_so_many_ranks_to_these_cpus(tmp_path, launcher, launcher_cpus, rank_cpus, placed):
    process(tmp_path, "self", "python3", "30", rank_cpus)
    process(tmp_path, "30", "bash", "20", rank_cpus)  # a wrapper script between launcher and rank
    process(tmp_path, "20", launcher, "1", launcher_cpus)
    process(tmp_path, "1", "systemd", "0", "0-127")
    slurm = {"SLURM_CPUS_ON_NODE": "16"} if launcher == "slurmstepd" else {}
    assert pinning.ranks_bound_by_launcher(8, slurm, tmp_path) == placed


def test_a_refused_cpu_affinity_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    bound = pinning.bind("numa")
    assert bound.warnings == (f"cannot bind to CPUs {cpu_ranges(bound.cpus)}: Operation not permitted",)


def test_a_gpu_that_has_failed_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError(15)  # NVML_ERROR_GPU_IS_LOST
        return index

    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=GPUS[index][0]),
        "nvmlDeviceGetUUID": lambda index: GPUS[index][1],
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
    }
    for name, function in functions.items():
        monkeypatch.setattr(topology.pynvml, name, function)
    assert list_gpus() == [GPUS[0], GPUS[2]]
    assert driver_versions() == ("580.65", 13000)


SUFFIXES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
HOROVODRUN = dict(zip((f"HOROVOD_{suffix}" for suffix in SUFFIXES), "5814", strict=True))
OPEN_MPI = dict(zip((f"OMPI_COMM_WORLD_{suffix}" for suffix in SUFFIXES), "3412", strict=True))
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (HOROVODRUN, LaunchEnv("horovodrun", 5, 8, 1, 4)),
        (OPEN_MPI, LaunchEnv("mpirun", 3, 4, 1, 2)),
        (PMI, LaunchEnv("mpirun (PMI)", 0, 2, 0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchEnv("mpirun (PMI)", 1, 2, 0, 1)),
        (SRUN, LaunchEnv("srun", 6, 7, 0, 2)),
        (SRUN | OPEN_MPI, LaunchEnv("mpirun", 3, 4, 1, 2)),  # the inner launcher
        (SRUN | OPEN_MPI | HOROVODRUN, LaunchEnv("horovodrun", 5, 8, 1, 4)),
        (SRUN | PMI, LaunchEnv("mpirun (PMI)", 0, 2, 0, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,3"}, LaunchEnv("srun", 6, 7, 0, 4)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "7"}, LaunchEnv("srun", 6, 7, 0, 7)),
        ({}, ALONE),
        ({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "0"}, ALONE),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),  # a batch script, outside of any job step
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ALONE),  # a size without a rank
    ],
)
def test_rank_and_size_are_the_launchers(environment: dict[str, str], expected: LaunchEnv) -> None:
    assert read_launch_env(environment) == expected
