"""Checks the network interfaces of a host and the speed of allreduce between ranks."""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.topology import read_text_or_empty
from horovod_volo.cluster.world import World
from horovod_volo.doctor.finding import Finding, failure, ok, warning

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LARGE_BYTES = 16 * 2**20
_SMALL_REPEATS, _LARGE_REPEATS = 30, 4
# Limits that only a defect exceeds; a good network is far from them.
_MIN_FRACTION_OF_LINE = 0.05
_MIN_BYTES_PER_SECOND = 50e6  # if the speed of the interface is unknown: less than half a gigabit
_MAX_SECONDS, _MAX_CYCLES = 0.02, 10  # of the latency, which has a part in Horovod's cycles
_CHOOSE_INTERFACE = (
    "Name the fast interface: horovodrun --network-interface NAME, or mpirun -mca btl_tcp_if_include NAME. "
    "Check that no other jobs run on these hosts."
)


@dataclass(frozen=True)
class Interface:
    """One network interface of this host."""

    name: str
    address: str  # IPv4; empty: none
    megabits: int  # per second; 0: unknown
    up: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gb/s" if self.megabits else "speed unknown"
        return f"{self.name} {self.address or 'without address'} ({speed if self.up else 'down'})"


@dataclass(frozen=True)
class AllreduceSpeed:
    """Measured speed of allreduce over all ranks."""

    latency_seconds: float  # of 4 bytes, median
    bytes_per_second: float  # bus bandwidth: over the slowest link of a ring allreduce
    correct: bool  # whether the results were right


def list_interfaces(root: Path = Path("/")) -> list[Interface]:
    """Return this host's interfaces, without the loopback."""
    folders = sorted((root / "sys/class/net").glob("*"))
    return [_interface(folder) for folder in folders if folder.name != "lo" and (folder / "flags").exists()]


def measure_allreduce(world: World, device: torch.device) -> AllreduceSpeed:
    """Time allreduce of 4 bytes and of 16 MiB on `device`. Collective: every rank calls this."""
    small, large = torch.ones(1, device=device), torch.ones(_LARGE_BYTES // 4, device=device)
    _timed_average(world, small)  # Horovod negotiates a tensor at length only the first time
    latency = statistics.median(_timed_average(world, small) for _ in range(_SMALL_REPEATS))
    _timed_average(world, large)
    best = min(_timed_average(world, large) for _ in range(_LARGE_REPEATS))
    # A ring sends 2 (n - 1) / n of the data over each link.
    sent = 2 * (world.size - 1) / world.size * _LARGE_BYTES
    correct = bool(torch.allclose(large, torch.ones_like(large))) and abs(small.item() - 1) < 1e-3
    return AllreduceSpeed(latency, sent / best, correct)


def _timed_average(world: World, tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    world.average_(tensor, f"links.{tensor.numel()}")
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def _interface(folder: Path) -> Interface:
    speed = read_text_or_empty(folder / "speed")  # -1 or unreadable where the interface does not know
    return Interface(
        name=folder.name,
        address=_address(folder.name),
        megabits=max(0, int(speed)) if speed.removeprefix("-").isdecimal() else 0,
        up=bool(int(read_text_or_empty(folder / "flags") or "0", 16) & _IFF_UP),
    )


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def check_interfaces() -> list[Finding]:
    """List this host's network interfaces, and check that gloo's exists."""
    interfaces = list_interfaces()
    usable = [one for one in interfaces if one.up or one.address]
    host, names = socket.gethostname(), [one.name for one in usable]
    findings = [ok("network", f"{host}: {', '.join(map(str, usable)) or 'only the loopback'}")]
    gloo_interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if gloo_interface not in ("", "lo", *names):
        text = f"HOROVOD_GLOO_IFACE is {gloo_interface}, which is missing or down on {host}"
        remedy = f"Name one that is up: {', '.join(names) or 'lo'}."
        findings.append(failure("network", text, remedy))
    return findings


def check_allreduce(world: World) -> list[Finding]:
    """Time allreduce on the devices that training uses. Collective: every rank calls this."""
    if world.size == 1:
        return []
    resources = rank_resources(world)
    speed = measure_allreduce(world, resources.device)
    fastest_line = max((one.megabits for one in list_interfaces() if one.up), default=0)
    hosts = world.allgather_object((socket.gethostname(), fastest_line))
    devices = "GPUs" if resources.device.type == "cuda" else "CPUs"
    several_hosts = len({host for host, _ in hosts}) > 1
    slowest_line = min(megabits for _, megabits in hosts) if several_hosts else 0
    cycle_seconds = float(os.environ.get("HOROVOD_CYCLE_TIME", "1")) / 1000
    # All ranks report rank 0's measurement, so that the report has one line for it.
    findings: list[Finding] = world.broadcast_object(
        assess_allreduce(speed, slowest_line, cycle_seconds, devices)
    )
    return findings


def assess_allreduce(
    speed: AllreduceSpeed, line_megabits: int, cycle_seconds: float, devices: str
) -> list[Finding]:
    """Compare bandwidth with the slowest host's fastest interface, and latency with Horovod's cycle time."""
    bandwidth, latency = speed.bytes_per_second, speed.latency_seconds
    if not speed.correct:
        remedy = "Run with NCCL_DEBUG=WARN; use the same Horovod, NCCL and driver on every rank."
        return [failure("ring", "sums over all ranks are wrong", remedy)]
    measured = f"between {devices}: {latency * 1000:.1f} ms for 4 bytes, {_rate(bandwidth)} for 16 MiB"
    findings = []
    line = line_megabits * 1e6 / 8
    if line and bandwidth < _MIN_FRACTION_OF_LINE * line:
        text = f"{measured}: less than {_MIN_FRACTION_OF_LINE:.0%} of the interfaces' {_rate(line)}"
        findings.append(warning("ring", text, _CHOOSE_INTERFACE))
    elif bandwidth < _MIN_BYTES_PER_SECOND:
        text = f"{measured}: a gigabit line carries twice {_rate(_MIN_BYTES_PER_SECOND)}"
        findings.append(warning("ring", text, _CHOOSE_INTERFACE))
    max_latency = _MAX_SECONDS + _MAX_CYCLES * cycle_seconds
    if latency > max_latency:
        expected = f"with a cycle time of {cycle_seconds * 1000:g} ms, less than {max_latency * 1000:.0f} ms"
        remedy = (
            "Look for other processes on the hosts' cores, and for idle ranks with HOROVOD_LOG_LEVEL=debug."
        )
        findings.append(warning("ring", f"{measured}: {expected} was expected", remedy))
    return findings or [ok("ring", measured)]


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"
