"""Checks what the ranks of a host share: CPUs, memory, shared memory, open files and the network.

Values of environment variables are never part of a finding, because reports are passed on.
"""

import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.topology import list_gpus, read_host, read_text_or_empty
from horovod_volo.core.errors import counted
from horovod_volo.doctor.report import Finding, failure, ok, warning

_MIB, _GIB = 2**20, 2**30

# A rank uses almost half a GiB for torch, Horovod and DALI before its first image.
MEMORY_NEEDED, MEMORY_WANTED = _GIB, 4 * _GIB
# Open MPI creates a file of 4 MiB there for each rank, NCCL several buffers of that size for each GPU.
SHARED_NEEDED, SHARED_NEEDED_BY_GPU = 5 * _MIB, 32 * _MIB
# 64 open shards, sockets (gloo: four for each rank), logs and libraries; CUDA opens hundreds.
FILES_NEEDED, FILES_WANTED, FILES_FOR_EACH_RANK = 128, 512, 4
_IFF_UP = 0x1
_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSW(OR)?DS?|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|(?<![a-z]))KEYS?)(_|$)",
    re.I,
)
_NAME_OF_PLACE = re.compile(r"_(FILE|PATH|DIR|SOCK|URL)$", re.I)
# horovodrun sets this one with all others in the command line of each rank, quoted for one shell or two.
_OF_RANK = b" HOROVOD_RANK="
_SET_VARIABLE = re.compile(rb"""[\s'"]([A-Za-z_]\w*)=['"]*[^'"\s]""")


def check_topology() -> Iterator[Finding]:
    """Report the host's CPUs, GPUs and network cards."""
    host = read_host(driver_gpus=list_gpus())
    cores, threads = len(host.cores), sum(map(len, host.cores))
    nics = f"RDMA NICs {', '.join(map(str, host.nics))}" if host.nics else "no RDMA NIC"
    numa = counted(len(host.nodes), "NUMA node")
    yield ok(f"{cores} cores, {threads} hardware threads, {numa}, {len(host.gpus) or 'no'} GPUs, {nics}")


def check_binding(binding: Binding) -> Iterator[Finding]:
    """Report the CPUs, GPU and network card of this rank."""
    gpu = f", GPU {binding.gpu.name}" if binding.gpu else ""
    unchanged = "".join(f"; {text}" for text in binding.warnings) if binding.by_launcher else ""
    yield ok(f"{binding.mode}: {binding}{gpu}{unchanged}")
    if not binding.by_launcher:
        remedy = "Request these CPUs for the job, or start fewer ranks; --binding none uses all allowed CPUs."
        yield from (warning(text, remedy) for text in binding.warnings)


def check_memory(ranks: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Report whether the host's free memory is enough for its ranks."""
    per_rank = free_memory(root) / ranks
    text = f"{per_rank / _GIB:.{0 if per_rank >= 10 * _GIB else 1}f} GiB free for each rank"
    remedy = "End other processes on the host, request more memory, or start fewer ranks on it."
    if per_rank < MEMORY_NEEDED:
        yield failure(f"{text}: a rank does not start with less than {MEMORY_NEEDED // _GIB}", remedy)
    elif per_rank < MEMORY_WANTED:
        yield warning(f"{text}: images and checkpoints may need {MEMORY_WANTED // _GIB}", remedy)
    else:
        yield ok(text)


def free_memory(root: Path = Path("/")) -> int:
    """Return the free bytes of the host, or of this process's control groups where they have less."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([host, *_free_in_groups(root)])


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each limited control group of this process: a container's, or a job's."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("limit_in_bytes", "usage_in_bytes", "stat") if controllers else ("max", "current", "stat")
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            limit, used, stat = (read_text_or_empty(folder / f"memory.{name}") for name in names)
            if limit.isdecimal() and used:
                cache = [line.split()[1] for line in stat.splitlines() if line.startswith("inactive_file ")]
                yield int(limit) - int(used) + sum(map(int, cache))  # the kernel can evict cached files


def check_shared_memory(ranks: int, on_gpu: bool, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Report whether the ranks of a host have room for MPI and NCCL in shared memory."""
    per_rank = SHARED_NEEDED_BY_GPU if on_gpu else SHARED_NEEDED
    try:
        state = os.statvfs(folder)
    except OSError:
        yield failure("is missing: the ranks of a host exchange data there", "Mount a tmpfs there.")
        return
    free = state.f_bavail * state.f_frsize
    if free >= ranks * per_rank:  # not how much: that changes between the looks of two ranks
        yield ok(f"at least {per_rank // _MIB} MiB free for each rank")
    else:
        yield failure(
            f"{free // _MIB:,} MiB free: {'NCCL and MPI' if on_gpu else 'MPI'} may need {per_rank // _MIB} "
            "MiB for each rank",
            "Remove what killed processes have left there (`ls -l /dev/shm`), or enlarge it: mount -o "
            "remount,size=1G /dev/shm as root; a container is started with --shm-size=1g.",
        )


def check_open_files(ranks: int) -> Iterator[Finding]:
    """Report whether the soft limit allows shards, logs and the sockets to all ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = (base + FILES_FOR_EACH_RANK * ranks for base in (FILES_NEEDED, FILES_WANTED))
    remedy = f"Run `ulimit -n {wanted}` before the launcher, on every host"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        remedy += f"; raise the hard limit, {hard}, in /etc/security/limits.conf"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield ok("no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    elif soft >= needed:
        yield warning(f"at most {soft}; a rank of {ranks} may need {wanted}", f"{remedy}.")
    else:
        yield failure(f"at most {soft}, but a rank of {ranks} needs {needed}", f"{remedy}.")


def interface_speeds() -> dict[str, int]:
    """Return the megabits per second, 0 if unknown, of this host's interfaces that are up, by name."""
    speeds = {}
    for name in sorted({name for _, name in socket.if_nameindex()} - {"lo"}):
        folder = Path("/sys/class/net", name)
        speed = read_text_or_empty(folder / "speed")  # -1 or unreadable where the interface does not know
        if int(read_text_or_empty(folder / "flags") or "0", 16) & _IFF_UP:
            speeds[name] = int(speed) if speed.isdecimal() else 0
    return speeds


def check_interfaces() -> Iterator[Finding]:
    """List this host's network interfaces that are up, and check that gloo's is one of them."""
    speeds, host = interface_speeds(), socket.gethostname()
    shown = [f"{name} ({speed / 1000:g} Gb/s)" if speed else name for name, speed in speeds.items()]
    yield ok(f"{host}: {', '.join(shown) or 'only the loopback'}")
    gloo_interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if gloo_interface not in ("", "lo", *speeds):
        text = f"HOROVOD_GLOO_IFACE is {gloo_interface}, which is missing or down on {host}"
        yield failure(text, f"Name one that is up: {', '.join(speeds) or 'lo'}.")


def check_command_lines() -> Iterator[Finding]:
    """Warn of secrets that horovodrun wrote into the command lines of this process and its ancestors."""
    names, pid = set(), os.getpid()
    while pid > 1:
        try:
            names |= secret_names(Path(f"/proc/{pid}/cmdline").read_bytes())
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:  # of another user, where /proc hides processes
            break
        pid = int(stat.rpartition(b")")[2].split()[1])  # the name before it may contain anything
    if names:
        yield warning(
            "horovodrun writes all variables into the command lines of ranks, where every user of the host "
            f"can read them with `ps`; these look like secrets: {', '.join(sorted(names))}",
            "Start with jobs/horovodrun.sh, which passes only what ranks need, or with mpirun; or unset them "
            "before horovodrun. Replace secrets that other users may have read.",
        )


def secret_names(command_line: bytes) -> set[str]:
    """Return the names of variables that horovodrun sets on a command line and that look like secrets."""
    arguments = [argument for argument in command_line.split(b"\0") if _OF_RANK in argument]
    names = {name.decode() for argument in arguments for name in _SET_VARIABLE.findall(argument)}
    return {name for name in names if _SECRET_NAME.search(name) and not _NAME_OF_PLACE.search(name)}
