"""Network interfaces of this host, and the measured speed of allreduce over all ranks."""

from __future__ import annotations

import fcntl
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from horovod_volo.cluster.topology import read_text_or_empty
from horovod_volo.cluster.world import World

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LARGE_BYTES = 16 * 2**20
_SMALL_REPEATS, _LARGE_REPEATS = 30, 4


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
