"""What the host leaves to each rank: cores, memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.launch_env import LaunchEnv
from horovod_volo.cluster.nvml import list_gpus
from horovod_volo.cluster.topology import Host, read_host
from horovod_volo.doctor.finding import Finding, attempt, failure, ok, warning

_MIB, _GIB = 2**20, 2**30

# A rank has taken almost half a GiB when torch, Horovod and DALI are loaded, before its first image.
MEMORY_NEEDED, MEMORY_WANTED = _GIB, 4 * _GIB
# Open MPI gives each rank a file of 4 MiB there, NCCL several buffers as large for each GPU.
SHARED_NEEDED, SHARED_NEEDED_BY_GPU = 5 * _MIB, 32 * _MIB
# 64 open shards, the ring's sockets (gloo: four for each rank), logs and libraries; CUDA opens hundreds.
FILES_NEEDED, FILES_WANTED, FILES_FOR_EACH_RANK = 128, 512, 4


def look_at_host(place: LaunchEnv, bound: Binding, root: Path = Path("/")) -> list[Finding]:
    """Look at what this rank has of its host."""
    return [
        *attempt("topology", lambda: [ok("topology", _described(read_host(root, list_gpus())))]),
        *attempt("binding", lambda: _binding(bound)),
        *attempt("memory", lambda: [judge_memory(free_memory(root), place.local_size)]),
        *attempt(
            "/dev/shm", lambda: [judge_shared_memory(_free_shared(root), place.local_size, bool(bound.gpu))]
        ),
        *attempt(
            "open files", lambda: [judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE), place.size)]
        ),
    ]


def _described(host: Host) -> str:
    cores, threads = len(host.cores), sum(map(len, host.cores))
    parts = [
        f"{cores} cores" if cores == threads else f"{cores} cores, {threads} hardware threads",
        f"{len(host.nodes)} NUMA node{'s' if len(host.nodes) > 1 else ''}",
        f"{len(host.gpus) or 'no'} GPU{'' if len(host.gpus) == 1 else 's'}",
        f"RDMA cards {', '.join(map(str, host.cards))}" if host.cards else "no RDMA card",
    ]
    return ", ".join(parts)


def _binding(bound: Binding) -> Iterator[Finding]:
    gpu = f", GPU {bound.gpu.name}" if bound.gpu else ""
    kept = "".join(f"; {remark}" for remark in bound.remarks) if bound.placed else ""
    yield ok("binding", f"{bound.mode}: {bound}{gpu}{kept}")
    if not bound.placed:
        remedy = "Give the job these CPUs, or start fewer ranks; --binding none takes what there is."
        yield from (warning("binding", remark, remedy) for remark in bound.remarks)


def judge_memory(free: int, ranks: int) -> Finding:
    """Say whether each rank of the host finds memory enough."""
    share = free / ranks
    told = f"{share / _GIB:.{0 if share >= 10 * _GIB else 1}f} GiB free for each rank"
    remedy = "End what else runs on the host, ask the scheduler for more memory, or start fewer ranks on it."
    if share < MEMORY_NEEDED:
        return failure(
            "memory", f"{told}: a rank does not start with less than {MEMORY_NEEDED // _GIB}", remedy
        )
    if share < MEMORY_WANTED:
        return warning("memory", f"{told}: images and checkpoints may want {MEMORY_WANTED // _GIB}", remedy)
    return ok("memory", told)


def judge_shared_memory(free: int | None, ranks: int, on_gpu: bool) -> Finding:
    """Say whether MPI and NCCL find room for the ranks of the host."""
    each = SHARED_NEEDED_BY_GPU if on_gpu else SHARED_NEEDED
    remedy = "As root: mount -o remount,size=1G /dev/shm. A container is started with --shm-size=1g."
    if free is None:
        return failure("/dev/shm", "is missing: ranks of one host meet there", "Mount a tmpfs there.")
    told = f"{free / _GIB:.0f} GiB free" if free >= 10 * _GIB else f"{free // _MIB} MiB free"
    if free < ranks * each:
        what = "NCCL and MPI" if on_gpu else "MPI"
        return failure(
            "/dev/shm", f"{told}: {what} may want {each // _MIB} MiB for each rank of the host", remedy
        )
    return ok("/dev/shm", told)


def judge_open_files(limits: tuple[int, int], ranks: int) -> Finding:
    """Say whether a rank may open its shards, its logs, and sockets to all others."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    needed, wanted = (least + FILES_FOR_EACH_RANK * ranks for least in (FILES_NEEDED, FILES_WANTED))
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    higher = f"Run `ulimit -n {wanted}` before the launcher, on every host"
    remedy = (
        f"{higher}."
        if enough
        else f"{higher}; the hard limit, {hard}, is raised in /etc/security/limits.conf."
    )
    if soft < needed:
        return failure("open files", f"at most {soft}, but a rank of {ranks} needs {needed}", remedy)
    if soft < wanted:
        return warning("open files", f"at most {soft}; a rank of {ranks} may want {wanted}", remedy)
    return ok("open files", f"at most {soft}")


def free_memory(root: Path = Path("/")) -> int:
    """Return what the host has free, or this process's group if that is less."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([host, *_left_to_groups(root)])


def _left_to_groups(root: Path) -> Iterator[int]:
    """Yield what each control group around this process leaves: a container's, or a job's."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        inside = mount / path.lstrip("/")
        for folder in [inside, *inside.parents]:
            if folder.is_relative_to(mount):
                yield from _left(folder, *names)


def _left(folder: Path, limit: str, used: str) -> Iterator[int]:
    try:
        most, now = ((folder / name).read_text(encoding="utf-8").strip() for name in (limit, used))
        stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:  # a group that sets no limit, or one outside of the container
        return
    cache = next((int(line.split()[1]) for line in stat if line.startswith("inactive_file ")), 0)
    if most.isdecimal():
        yield int(most) - int(now) + cache  # files in the cache give way


def _free_shared(root: Path) -> int | None:
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return state.f_bavail * state.f_frsize
