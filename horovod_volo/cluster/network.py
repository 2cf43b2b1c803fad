"""The ways between ranks: this host's network interfaces, and how fast a sum over all ranks is."""

from __future__ import annotations

import fcntl
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.core.json_file import fact

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_UP = 0x1  # IFF_UP
_LARGE_BYTES = 16 * 2**20
_SMALL_SUMS, _LARGE_SUMS = 30, 4


@dataclass(frozen=True)
class Interface:
    """One network interface of this host."""

    name: str
    address: str  # IPv4; empty: none
    megabits: int  # per second; 0: not known
    up: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gb/s" if self.megabits else "speed unknown"
        return f"{self.name} {self.address or 'without address'} ({speed if self.up else 'down'})"


@dataclass(frozen=True)
class Speed:
    """How fast a sum over all ranks is."""

    latency_seconds: float  # of 4 bytes, median
    bytes_per_second: float  # over the slowest link of a ring that does the same
    right: bool  # whether the sums were what they must be


def list_interfaces(root: Path = Path("/")) -> list[Interface]:
    """Return this host's interfaces, without the loopback."""
    folders = sorted((root / "sys/class/net").glob("*"))
    return [_interface(folder) for folder in folders if folder.name != "lo" and (folder / "flags").exists()]


def measure(world: World, device: torch.device) -> Speed:
    """Time small and large sums over all ranks, as gradients travel. Collective: every rank calls this."""
    small, large = torch.ones(1, device=device), torch.ones(_LARGE_BYTES // 4, device=device)
    _timed_sum(world, small)  # the first sum of a name is agreed on at more length
    latency = statistics.median(_timed_sum(world, small) for _ in range(_SMALL_SUMS))
    _timed_sum(world, large)
    best = min(_timed_sum(world, large) for _ in range(_LARGE_SUMS))
    # A ring sends 2 (n - 1) / n of the data over each link.
    share = 2 * (world.size - 1) / world.size
    right = bool(torch.allclose(large, torch.ones_like(large))) and abs(small.item() - 1) < 1e-3
    return Speed(latency, share * _LARGE_BYTES / best, right)


def _timed_sum(world: World, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    world.average_(tensor, f"links.{tensor.numel()}")
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began


def _interface(folder: Path) -> Interface:
    speed = fact(folder / "speed")  # -1, or no answer, where the interface does not know
    return Interface(
        name=folder.name,
        address=_address(folder.name),
        megabits=max(0, int(speed)) if speed.removeprefix("-").isdecimal() else 0,
        up=bool(int(fact(folder / "flags") or "0", 16) & _UP),
    )


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
