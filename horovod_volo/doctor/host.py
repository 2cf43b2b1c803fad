"""Checks what the ranks of a host share: CPUs, memory, shared memory, open files and the network.

Nothing is removed: what is left in shared memory is named with the command that removes it. Values of
environment variables are never part of a finding, because reports are passed on.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shlex
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.topology import list_gpus, read_host, read_text_or_empty
from horovod_volo.doctor.report import Finding, failure, ok, warning

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

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSW(OR)?DS?|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|(?<![a-z]))KEYS?)(_|$)",
    re.I,
)
_NAME_OF_PLACE = re.compile(r"_(FILE|PATH|DIR|SOCK|URL)$", re.I)
# horovodrun sets this one with all others in the command line of each rank, quoted for one shell or two.
_OF_RANK = b" HOROVOD_RANK="
_SET_VARIABLE = re.compile(rb"""[\s'"]([A-Za-z_]\w*)=['"]*[^'"\s]""")
_OTHER_LOOPBACK = "127.0.0.2"  # of this host too, but only a server of all interfaces listens there


def check_topology() -> Iterator[Finding]:
    """Report the host's CPUs, GPUs and network cards."""
    host = read_host(driver_gpus=list_gpus())
    cores, threads = len(host.cores), sum(map(len, host.cores))
    nics = f"RDMA NICs {', '.join(map(str, host.nics))}" if host.nics else "no RDMA NIC"
    numa = f"{len(host.nodes)} NUMA node{'s' if len(host.nodes) > 1 else ''}"
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
    text = f"{free // _MIB:,} MiB free"
    if free >= ranks * per_rank:
        yield ok(text)
    else:
        yield failure(
            f"{text}: {'NCCL and MPI' if on_gpu else 'MPI'} may need {per_rank // _MIB} MiB for each rank",
            "As root: mount -o remount,size=1G /dev/shm. A container is started with --shm-size=1g.",
        )


def check_leftovers(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Warn of each kind of files in shared memory that killed processes of this user have left.

    Only files older than all of their kind that are in use: the command that removes them spares the others.
    """
    user, host, now = os.getuid(), os.uname().nodename, time.time()
    for pattern, owner in _LEFT_IN_SHARED_MEMORY.items():
        name, states = pattern.format(host=host, user=user), []
        for path in filter(Path.is_file, folder.glob(name)):
            with suppress(FileNotFoundError):  # another process has removed it since
                states.append(path.lstat())
        # Listed after the files: whoever uses one of them is among the processes.
        used = _files_in_use(user) if states else set()
        oldest_in_use = min([now, *(one.st_mtime for one in states if _device_and_inode(one) in used)])
        left = [one for one in states if one.st_uid == user and one.st_mtime < oldest_in_use - 1]
        if left:
            until = int(max(one.st_mtime for one in left)) + 1
            mib = sum(one.st_blocks for one in left) / 2048
            count = f"{len(left)} file{'s' if len(left) > 1 else ''}"
            text = f"{count} of {owner} in {folder}, {mib:.1f} MiB: left by processes that were killed, and "
            text += "used by none. To remove them"
            which = f"-type f -user {user} -name {shlex.quote(name)} ! -newermt @{until}"
            yield warning(text, f"find {folder} {which} -delete")


def _files_in_use(user: int) -> set[str]:
    """Return the files that processes of this user map or hold open, by `_device_and_inode`.

    Their paths in /proc do not tell: the C library links a semaphore from a file of another name.
    """
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is of another container
            if process.stat().st_uid != user:
                continue
            maps = (process / "maps").read_text(errors="replace").splitlines()
            used |= {" ".join(line.split(maxsplit=5)[3:5]) for line in maps}
            for opened in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed since
                    used.add(_device_and_inode(opened.stat()))
    return used


def _device_and_inode(state: os.stat_result) -> str:
    """Return what identifies a file, in the form of /proc/PID/maps."""
    return f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x} {state.st_ino}"


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


class Interface(NamedTuple):
    """One network interface of this host."""

    name: str
    address: str  # IPv4; empty: none
    megabits: int  # per second; 0: unknown
    up: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gb/s" if self.megabits else "speed unknown"
        return f"{self.name} {self.address or 'without address'} ({speed if self.up else 'down'})"


def list_interfaces() -> list[Interface]:
    """Return this host's interfaces, without the loopback."""
    interfaces = []
    for name in sorted({name for _, name in socket.if_nameindex()} - {"lo"}):
        folder = Path("/sys/class/net", name)
        speed = read_text_or_empty(folder / "speed")  # -1 or unreadable where the interface does not know
        is_up = bool(int(read_text_or_empty(folder / "flags") or "0", 16) & _IFF_UP)
        interfaces.append(Interface(name, _address(name), int(speed) if speed.isdecimal() else 0, is_up))
    return interfaces


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def check_interfaces() -> Iterator[Finding]:
    """List this host's network interfaces, and check that gloo's exists."""
    usable = [one for one in list_interfaces() if one.up or one.address]
    host, names = socket.gethostname(), [one.name for one in usable]
    yield ok(f"{host}: {', '.join(map(str, usable)) or 'only the loopback'}")
    gloo_interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if gloo_interface not in ("", "lo", *names):
        text = f"HOROVOD_GLOO_IFACE is {gloo_interface}, which is missing or down on {host}"
        yield failure(text, f"Name one that is up: {', '.join(names) or 'lo'}.")


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


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Warn if the rendezvous server of horovodrun is on this host and listens on all interfaces."""
    address, port = (environment.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    if not address or not port.isdecimal():
        return
    try:
        socket.create_connection((_OTHER_LOOPBACK, int(port)), timeout=1).close()
    except OSError:
        return
    yield warning(
        f"horovodrun's server at {address}:{port} listens on all interfaces, without authentication; it, "
        "and ranks that connect through gloo, unpickle what they are sent: who reaches them can run code",
        "Use a trusted network only: set NETWORK_INTERFACE in jobs/env.sh, or HOROVOD_GLOO_IFACE, to a "
        "private interface, and close the hosts' ports to other networks; or start with mpirun.",
    )
