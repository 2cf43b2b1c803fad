"""Checks the resources of a host that its ranks share: CPUs, memory, shared memory and open files.

Nothing is removed: what is left in shared memory is named with the command that removes it.
"""

from __future__ import annotations

import os
import resource
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.launch_env import LaunchEnv
from horovod_volo.cluster.topology import Host, list_gpus, read_host
from horovod_volo.doctor.finding import Finding, failure, ok, run_check, warning

_MIB, _GIB = 2**20, 2**30

# A rank uses almost half a GiB for torch, Horovod and DALI before its first image.
MEMORY_NEEDED, MEMORY_WANTED = _GIB, 4 * _GIB
# Open MPI creates a file of 4 MiB there for each rank, NCCL several buffers of that size for each GPU.
SHARED_NEEDED, SHARED_NEEDED_BY_GPU = 5 * _MIB, 32 * _MIB
# 64 open shards, sockets (gloo: four for each rank), logs and libraries; CUDA opens hundreds.
FILES_NEEDED, FILES_WANTED, FILES_FOR_EACH_RANK = 128, 512, 4
# What processes that were killed may leave in /dev/shm, by the names of the files. Open MPI's have the host:
# a container that shares the folder does not see the processes of another one.
_LEFT_IN_SHARED_MEMORY = {
    "vader_segment.{host}.{user}.*": "Open MPI",
    "sem.mp-*": "Python's multiprocessing",
    "torch_*": "PyTorch",
    "nccl-*": "NCCL",
}


def check_host(launch: LaunchEnv, binding: Binding, root: Path = Path("/")) -> list[Finding]:
    """Check the resources of this rank's host."""
    on_gpu = bool(binding.gpu)
    return [
        *run_check("topology", lambda: [ok("topology", _summary(read_host(root, list_gpus())))]),
        *run_check("binding", lambda: _binding_findings(binding)),
        *run_check("memory", lambda: [assess_memory(free_memory(root), launch.local_size)]),
        *run_check(
            "/dev/shm", lambda: [assess_shared_memory(_free_shared_memory(root), launch.local_size, on_gpu)]
        ),
        *run_check("leftovers", lambda: leftover_findings(root)),
        *run_check(
            "open files", lambda: [assess_open_files(resource.getrlimit(resource.RLIMIT_NOFILE), launch.size)]
        ),
    ]


def _summary(host: Host) -> str:
    cores, threads = len(host.cores), sum(map(len, host.cores))
    parts = [
        f"{cores} cores" if cores == threads else f"{cores} cores, {threads} hardware threads",
        f"{len(host.nodes)} NUMA node{'s' if len(host.nodes) > 1 else ''}",
        f"{len(host.gpus) or 'no'} GPU{'' if len(host.gpus) == 1 else 's'}",
        f"RDMA NICs {', '.join(map(str, host.nics))}" if host.nics else "no RDMA NIC",
    ]
    return ", ".join(parts)


def _binding_findings(binding: Binding) -> Iterator[Finding]:
    gpu = f", GPU {binding.gpu.name}" if binding.gpu else ""
    unchanged = "".join(f"; {text}" for text in binding.warnings) if binding.by_launcher else ""
    yield ok("binding", f"{binding.mode}: {binding}{gpu}{unchanged}")
    if not binding.by_launcher:
        remedy = "Request these CPUs for the job, or start fewer ranks; --binding none uses all allowed CPUs."
        yield from (warning("binding", text, remedy) for text in binding.warnings)


def assess_memory(free: int, ranks: int) -> Finding:
    """Report whether the host's free memory, in bytes, is enough for its ranks."""
    per_rank = free / ranks
    text = f"{per_rank / _GIB:.{0 if per_rank >= 10 * _GIB else 1}f} GiB free for each rank"
    remedy = "End other processes on the host, request more memory, or start fewer ranks on it."
    if per_rank < MEMORY_NEEDED:
        return failure(
            "memory", f"{text}: a rank does not start with less than {MEMORY_NEEDED // _GIB}", remedy
        )
    if per_rank < MEMORY_WANTED:
        return warning("memory", f"{text}: images and checkpoints may need {MEMORY_WANTED // _GIB}", remedy)
    return ok("memory", text)


def assess_shared_memory(free: int | None, ranks: int, on_gpu: bool) -> Finding:
    """Report whether /dev/shm has enough bytes free for MPI and NCCL; None: it does not exist."""
    per_rank = SHARED_NEEDED_BY_GPU if on_gpu else SHARED_NEEDED
    remedy = "As root: mount -o remount,size=1G /dev/shm. A container is started with --shm-size=1g."
    if free is None:
        text = "is missing: the ranks of a host exchange data there"
        return failure("/dev/shm", text, "Mount a tmpfs there.")
    text = f"{free / _GIB:.0f} GiB free" if free >= 10 * _GIB else f"{free // _MIB} MiB free"
    if free < ranks * per_rank:
        users = "NCCL and MPI" if on_gpu else "MPI"
        text = f"{text}: {users} may need {per_rank // _MIB} MiB for each rank of the host"
        return failure("/dev/shm", text, remedy)
    return ok("/dev/shm", text)


def leftover_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield a warning for each kind of files in shared memory that processes of this user have left."""
    folder, user = root / "dev/shm", os.getuid()
    host = os.uname().nodename
    kinds = {pattern.format(host=host, user=user): name for pattern, name in _LEFT_IN_SHARED_MEMORY.items()}
    # Before the processes are: a file that is created from now on is in neither list.
    files = {pattern: _regular_files(folder, pattern, user) for pattern in kinds}
    used = _used_by_processes(root, user) if any(files.values()) else set()
    for pattern, states in files.items():
        left = {path for path, state in states.items() if (state.st_dev, state.st_ino) not in used}
        left = {path for path in left if path.exists()}
        if left:
            kib = sum(states[path].st_blocks for path in left) // 2
            size = f"{kib / 1024:.0f} MiB" if kib >= 1024 else f"{kib} KiB"
            count = f"{len(left)} file{'s' if len(left) > 1 else ''} of {kinds[pattern]} in {folder}, {size}"
            text = f"{count}: left by processes that were killed, and used by none. To remove them"
            yield warning("leftovers", text, _removal(folder, pattern, user, left, states))


def _removal(
    folder: Path, pattern: str, user: int, left: set[Path], states: Mapping[Path, os.stat_result]
) -> str:
    """Return a command that removes files that are left, and none that is in use or created later."""
    until = int(max(states[path].st_mtime for path in left)) + 1
    if all(state.st_mtime > until for path, state in states.items() if path not in left):
        return f"find {folder} -user {user} -name {shlex.quote(pattern)} ! -newermt @{until} -delete"
    return shlex.join(["rm", *map(str, sorted(left))])


def _regular_files(folder: Path, pattern: str, user: int) -> Mapping[Path, os.stat_result]:
    states = {}
    for path in sorted(folder.glob(pattern)):
        with suppress(FileNotFoundError):  # another process has removed it since
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and state.st_uid == user:
                states[path] = state
    return states


def _used_by_processes(root: Path, user: int) -> set[tuple[int, int]]:
    """Return device and inode of each file that a process of this user maps or holds open."""
    used = set()
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid != user:
                continue
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                major, minor = (int(number, 16) for number in device.split(":"))
                used.add((os.makedev(major, minor), int(inode)))
            for opened in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed since
                    state = opened.stat()
                    used.add((state.st_dev, state.st_ino))
        except OSError:  # the process has ended, or is of another container
            continue
    return used


def assess_open_files(limits: tuple[int, int], ranks: int) -> Finding:
    """Report whether the soft limit allows shards, logs and the sockets to all ranks."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    needed, wanted = (base + FILES_FOR_EACH_RANK * ranks for base in (FILES_NEEDED, FILES_WANTED))
    hard_limit_suffices = hard == resource.RLIM_INFINITY or hard >= wanted
    raise_soft = f"Run `ulimit -n {wanted}` before the launcher, on every host"
    raise_hard = f"; raise the hard limit, {hard}, in /etc/security/limits.conf"
    remedy = f"{raise_soft}." if hard_limit_suffices else f"{raise_soft}{raise_hard}."
    if soft < needed:
        return failure("open files", f"at most {soft}, but a rank of {ranks} needs {needed}", remedy)
    if soft < wanted:
        return warning("open files", f"at most {soft}; a rank of {ranks} may need {wanted}", remedy)
    return ok("open files", f"at most {soft}")


def free_memory(root: Path = Path("/")) -> int:
    """Return the free bytes of the host, or of this process's control groups where they have less."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([host, *_free_in_groups(root)])


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process: a container's, or a job's."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        files = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder.is_relative_to(mount):
                yield from _free_in_group(folder, *files)


def _free_in_group(folder: Path, limit_file: str, usage_file: str) -> Iterator[int]:
    try:
        limit, usage, stat = (
            (folder / f"memory.{name}").read_text(encoding="utf-8").strip()
            for name in (limit_file, usage_file, "stat")
        )
    except OSError:  # the group has no limit, or is outside the container
        return
    cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    if limit.isdecimal():
        yield int(limit) - int(usage) + cache  # the kernel can evict cached files


def _free_shared_memory(root: Path) -> int | None:
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return state.f_bavail * state.f_frsize
