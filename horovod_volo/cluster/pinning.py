"""Puts this process on its part of the host, before anything starts threads or touches CUDA.

Threads inherit CPUs and memory policy from the thread that starts them, so this comes first. What the
system does not permit is said, and the run goes on without it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from horovod_volo.cluster.binding import Binding, Seat, plan
from horovod_volo.cluster.env_vars import HorovodSwitches, launch_env_vars
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.nvml import list_gpus, visible
from horovod_volo.cluster.topology import Host, address_of, cpu_list, cpu_ranges, read_host
from horovod_volo.core.json_file import fact

# (set_mempolicy, get_mempolicy): the C library has no functions for them.
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _PREFERRED, _PREFERRED_MANY = 0, 1, 5
_MOST_NODES = 1024

# What a launcher is called where it runs above its ranks.
_LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "slurmstepd"}


def bind(mode: str, switches: HorovodSwitches | None = None, root: Path = Path("/")) -> Binding:
    """Bind this process and set the variables its libraries read; return what was done."""
    binding = planned(mode, root)
    set_variables(os.environ, launch_env_vars(binding, switches or HorovodSwitches()))
    threads = compute_threads(os.environ, binding.threads)
    remarks = [f"OMP_NUM_THREADS is set: torch computes with {threads}, not {binding.threads} threads"]
    chosen = remarks if threads != binding.threads else []
    return replace(binding, remarks=(*binding.remarks, *chosen, *_pin(binding)))


def compute_threads(environment: Mapping[str, str], share: int) -> int:
    """Return how many threads torch computes with: what OMP_NUM_THREADS says, or the rank's share."""
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": two levels
    return int(outermost) if outermost.isdecimal() and int(outermost) > 0 else share


def planned(mode: str, root: Path = Path("/")) -> Binding:
    """Work out this rank's part of the host described below `root`, and touch nothing."""
    place, listed = read_launch_env(), list_gpus()
    host = read_host(root, listed)
    seat = Seat(
        local_rank=place.local_rank,
        local_size=place.local_size,
        allowed=frozenset(os.sched_getaffinity(0)),
        placed=placed_by_launcher(place.local_size, os.environ),
        visible=shown(host, listed, os.environ),
    )
    return plan(host, seat, mode)


def shown(
    host: Host, listed: Sequence[tuple[str, str]], environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return which of the host's GPUs CUDA shows this process; None: all."""
    numbers = visible(listed, environment)
    if numbers is None and len(listed) == len(host.gpus):
        return None
    names = [gpu.name for gpu in host.gpus]
    chosen = listed if numbers is None else [listed[number] for number in numbers]
    return tuple(names.index(address_of(address)) for address, _ in chosen)


def unbound() -> Binding:
    """Return the binding of a process that nobody binds."""
    return planned("none")


def set_variables(environment: MutableMapping[str, str], variables: dict[str, str]) -> None:
    """Set what the user, the site or the launcher has not set already: they know better."""
    for name, value in variables.items():
        environment.setdefault(name, value)


def placed_by_launcher(local_size: int, environment: Mapping[str, str], proc: Path = Path("/proc")) -> int:
    """Return among how many ranks the launcher shared out this process's CPUs; 0: it gave all of its own.

    One rank has a core or a part of the host to itself; several have a socket, if there are more ranks.
    """
    mine = _cpus_of(proc / "self")
    process = _parent(proc / "self")
    while process not in ("", "0"):
        if _name(proc / process).partition(".")[0] in _LAUNCHERS:
            theirs = len(_cpus_of(proc / process))
            # Slurm's own process is not held to the CPUs of its job.
            theirs = min(theirs, int(environment.get("SLURM_CPUS_ON_NODE", theirs)))
            return math.ceil(local_size * len(mine) / theirs) if len(mine) < theirs else 0
        process = _parent(proc / process)
    return 0


def memory_nodes() -> tuple[int, ...]:
    """Return the NUMA nodes that this thread's memory comes from; none where it has no policy."""
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return ()
    policy, mask = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // 64))()
    failed = ctypes.CDLL(None).syscall(calls[1], ctypes.byref(policy), mask, _MOST_NODES, 0, 0)
    if failed or policy.value == _DEFAULT:
        return ()
    return tuple(node for node in range(_MOST_NODES) if mask[node // 64] >> node % 64 & 1)


def _pin(binding: Binding) -> list[str]:
    """Do what is planned; return what could not be done."""
    if binding.mode == "none":
        return []
    problems = []
    for thread in Path("/proc/self/task").iterdir():  # one, unless a library was imported before
        try:
            os.sched_setaffinity(int(thread.name), binding.cpus)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as error:
            problems.append(f"CPUs {cpu_ranges(binding.cpus)} could not be taken: {error.strerror}")
    if binding.nodes and not memory_nodes():  # a policy from the launcher stays
        problem = _prefer(binding.nodes)
        if problem:
            problems.append(f"memory is not bound to NUMA node {cpu_ranges(binding.nodes)}: {problem}")
    return list(dict.fromkeys(problems))  # each once


def _prefer(nodes: tuple[int, ...]) -> str:
    """Take memory from these nodes while they have some; return what went wrong.

    Preferred, not bound: where a node is full, memory of another is slower, but none kills the rank.
    """
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return f"the system call's number on {platform.machine()} is not known here"
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    policy = _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY  # the latter from Linux 5.15 on
    failed = library.syscall(calls[0], policy, mask, _MOST_NODES + 1)
    return os.strerror(ctypes.get_errno()) if failed else ""


def _cpus_of(process: Path) -> set[int]:
    return set(cpu_list(_status(process, "Cpus_allowed_list")))


def _parent(process: Path) -> str:
    return _status(process, "PPid")


def _name(process: Path) -> str:
    return _status(process, "Name")


def _status(process: Path, field: str) -> str:
    lines = fact(process / "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")
