"""Binds this process to the CPUs and NUMA nodes of its rank, and sets the environment variables of libraries.

Call this before any library starts threads or initializes CUDA: threads inherit CPU affinity and memory
policy from the thread that starts them. If the operating system refuses a binding, that is only a warning.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from horovod_volo.cluster.binding import Binding, LaunchedRank, plan_binding
from horovod_volo.cluster.env_vars import HorovodOptions, launch_env_vars
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.nvml import cuda_visible_devices, list_gpus
from horovod_volo.cluster.topology import (
    Host,
    cpu_list,
    cpu_ranges,
    kernel_address,
    read_host,
    read_text_or_empty,
)

# Numbers of (set_mempolicy, get_mempolicy): the C library has no wrappers for them.
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MPOL_DEFAULT, _MPOL_PREFERRED, _MPOL_PREFERRED_MANY = 0, 1, 5
_MAX_NUMA_NODES = 1024

# Names of the processes that start ranks.
_LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "slurmstepd"}


def bind(mode: str, options: HorovodOptions | None = None, root: Path = Path("/")) -> Binding:
    """Bind this process and set the variables that its libraries read; return the binding in effect."""
    binding = plan_own_binding(mode, root)
    set_variables(os.environ, launch_env_vars(binding, options or HorovodOptions()))
    threads = compute_threads(os.environ, binding.threads)
    warnings = [*binding.warnings]
    if threads != binding.threads:
        warnings.append(
            f"OMP_NUM_THREADS is set: torch computes with {threads}, not {binding.threads} threads"
        )
    return replace(binding, warnings=(*warnings, *_apply(binding)))


def compute_threads(environment: Mapping[str, str], default: int) -> int:
    """Return the number of threads that torch computes with: OMP_NUM_THREADS, or else `default`."""
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": nested parallelism
    return int(outermost) if outermost.isdecimal() and int(outermost) > 0 else default


def plan_own_binding(mode: str, root: Path = Path("/")) -> Binding:
    """Return the binding of this rank on the host whose /sys and /proc lie below `root`; change nothing."""
    launch, driver_gpus = read_launch_env(), list_gpus()
    host = read_host(root, driver_gpus)
    rank = LaunchedRank(
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        ranks_bound_here=ranks_bound_by_launcher(launch.local_size, os.environ),
        visible_gpus=visible_gpus(host, driver_gpus, os.environ),
    )
    return plan_binding(host, rank, mode)


def visible_gpus(
    host: Host, driver_gpus: Sequence[tuple[str, str]], environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return the indices of the host's GPUs that CUDA shows to this process; None: all."""
    numbers = cuda_visible_devices(driver_gpus, environment)
    if numbers is None and len(driver_gpus) == len(host.gpus):
        return None
    visible = driver_gpus if numbers is None else [driver_gpus[number] for number in numbers]
    names = [gpu.name for gpu in host.gpus]
    return tuple(names.index(kernel_address(address)) for address, _ in visible)


def unbound() -> Binding:
    """Return the binding of a process that is not bound."""
    return plan_own_binding("none")


def set_variables(environment: MutableMapping[str, str], variables: dict[str, str]) -> None:
    """Set the variables that the user, the site or the launcher has not set."""
    for name, value in variables.items():
        environment.setdefault(name, value)


def ranks_bound_by_launcher(
    local_size: int, environment: Mapping[str, str], proc: Path = Path("/proc")
) -> int:
    """Return how many ranks the launcher bound to this process's CPUs; 0: it did not bind.

    The count is 1 where each rank has a core or a slice of the host, and more where ranks share a socket.
    """
    own = _allowed_cpus(proc / "self")
    process = _parent(proc / "self")
    while process not in ("", "0"):
        if _name(proc / process).partition(".")[0] in _LAUNCHERS:
            of_launcher = len(_allowed_cpus(proc / process))
            # slurmstepd itself is not confined to the CPUs of its job.
            of_launcher = min(of_launcher, int(environment.get("SLURM_CPUS_ON_NODE", of_launcher)))
            return math.ceil(local_size * len(own) / of_launcher) if len(own) < of_launcher else 0
        process = _parent(proc / process)
    return 0


def memory_nodes() -> tuple[int, ...]:
    """Return the NUMA nodes of this thread's memory policy; nothing with the default policy."""
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return ()
    policy, mask = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NUMA_NODES // 64))()
    failed = ctypes.CDLL(None).syscall(calls[1], ctypes.byref(policy), mask, _MAX_NUMA_NODES, 0, 0)
    if failed or policy.value == _MPOL_DEFAULT:
        return ()
    return tuple(node for node in range(_MAX_NUMA_NODES) if mask[node // 64] >> node % 64 & 1)


def _apply(binding: Binding) -> list[str]:
    """Set CPU affinity and memory policy; return what the system refused."""
    if binding.mode == "none":
        return []
    problems = []
    for thread in Path("/proc/self/task").iterdir():  # one, unless a library was imported before
        try:
            os.sched_setaffinity(int(thread.name), binding.cpus)
        except ProcessLookupError:
            continue  # the thread has ended
        except OSError as error:
            problems.append(f"cannot bind to CPUs {cpu_ranges(binding.cpus)}: {error.strerror}")
    if binding.memory_nodes and not memory_nodes():  # a policy from the launcher stays
        problem = _prefer_memory(binding.memory_nodes)
        if problem:
            nodes = cpu_ranges(binding.memory_nodes)
            problems.append(f"memory is not bound to NUMA node {nodes}: {problem}")
    return list(dict.fromkeys(problems))  # each once


def _prefer_memory(nodes: tuple[int, ...]) -> str:
    """Set the memory policy "preferred" for these nodes; return the error message, or nothing.

    Not "bind": when a node is full, memory of another node is slower, but nothing kills the rank.
    """
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return f"set_mempolicy is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * (_MAX_NUMA_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    policy = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_PREFERRED_MANY  # the latter since Linux 5.15
    failed = library.syscall(calls[0], policy, mask, _MAX_NUMA_NODES + 1)
    return os.strerror(ctypes.get_errno()) if failed else ""


def _allowed_cpus(process: Path) -> set[int]:
    return set(cpu_list(_status(process, "Cpus_allowed_list")))


def _parent(process: Path) -> str:
    return _status(process, "PPid")


def _name(process: Path) -> str:
    return _status(process, "Name")


def _status(process: Path, field: str) -> str:
    lines = read_text_or_empty(process / "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")
