"""What a host is made of, as the kernel and the driver tell it: cores, NUMA nodes, GPUs, network cards.

Read from files alone and torch-free: this is looked at before anything that starts threads. A host
that tells less (a container, a virtual machine) is read as far as it goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_volo.core.json_file import fact

UNKNOWN = -1
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_DEVICES = "sys/bus/pci/devices"
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor, and how the classes of what draws or computes begin
_CARDS = "sys/class/infiniband"
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_LOCAL, _FAR = 10, 255  # how the kernel writes the distance of a node to itself, and to one out of reach
_ROOT_BRIDGE, _OTHER_BRIDGE = 100, 1000  # farther than any way below one switch, below one bridge


@dataclass(frozen=True)
class Device:
    """Something on the PCI bus."""

    name: str
    path: tuple[str, ...]  # from the root bridge down to the device
    node: int  # NUMA node, or UNKNOWN


@dataclass(frozen=True)
class Gpu(Device):
    """A GPU, named by its PCI address."""

    uuid: str = ""


@dataclass(frozen=True)
class Card(Device):
    """A port of a network card that RDMA can use, named as InfiniBand's tools do."""

    port: int = 1
    interface: str = ""  # its network interface, where it has one

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Host:
    """One machine."""

    cores: tuple[tuple[int, ...], ...]  # physical cores: each its hardware threads, as CPU numbers
    nodes: dict[int, tuple[int, ...]]  # CPUs of each NUMA node
    distances: dict[int, dict[int, int]]
    gpus: tuple[Gpu, ...]  # in the driver's order
    cards: tuple[Card, ...]


def read_host(root: Path = Path("/"), gpus: Sequence[tuple[str, str]] = ()) -> Host:
    """Read the host whose files lie below `root`; `gpus`: addresses and UUIDs, as the driver lists them."""
    numbers = sorted(int(folder.name[4:]) for folder in (root / _NODES).glob("node[0-9]*"))
    nodes = {number: cpu_list(fact(root / _NODES / f"node{number}/cpulist")) for number in numbers}
    listed = tuple(sorted(cpu for cpus in nodes.values() for cpu in cpus))
    online = cpu_list(fact(root / _CPUS / "online")) or listed
    return Host(
        cores=_cores(root, online),
        nodes=nodes if listed else {0: online},
        distances=_distances(root, numbers),
        gpus=_gpus(root, gpus),
        cards=_cards(root),
    )


def distance(host: Host, one: Device, other: Device) -> int:
    """Tell how far apart two devices are: below one switch, one root bridge, one node, one socket, or not."""
    shared = 0
    for mine, its in zip(one.path, other.path, strict=False):
        if mine != its:
            break
        shared += 1
    if shared:
        steps = len(one.path) + len(other.path) - 2 * shared
        return steps if shared > 1 else _ROOT_BRIDGE + steps
    return _OTHER_BRIDGE + node_distance(host, one.node, other.node)


def node_distance(host: Host, one: int, other: int) -> int:
    """Tell how far apart two NUMA nodes are, in the kernel's measure."""
    if one == other and one != UNKNOWN:
        return _LOCAL
    return host.distances.get(one, {}).get(other, _FAR)


def cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's way to write numbers: "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def cpu_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as the kernel does."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _cores(root: Path, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    cores = set()
    for cpu in online:
        siblings = cpu_list(fact(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list"))
        cores.add(tuple(sorted(set(siblings) & set(online))) or (cpu,))
    return tuple(sorted(cores))


def _distances(root: Path, numbers: list[int]) -> dict[int, dict[int, int]]:
    rows = {number: fact(root / _NODES / f"node{number}/distance").split() for number in numbers}
    # A row has one number for each node that is online, in their order.
    return {number: dict(zip(numbers, map(int, row), strict=False)) for number, row in rows.items() if row}


def address_of(text: str) -> str:
    """Write a PCI address as the kernel does: the driver gives the domain eight digits, the kernel four."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def gpus_on_bus(root: Path = Path("/")) -> set[str]:
    """Return the addresses of NVIDIA's GPUs, without asking any driver."""
    return {
        folder.name
        for folder in (root / _DEVICES).glob("*")
        if fact(folder / "vendor") == _NVIDIA and fact(folder / "class").startswith(_DISPLAY)
    }


def _gpus(root: Path, listed: Sequence[tuple[str, str]]) -> tuple[Gpu, ...]:
    """Return the GPUs that the driver lists, and those that a cgroup hides from it but not from us."""
    uuids = {address_of(address): uuid for address, uuid in listed}
    hidden = gpus_on_bus(root) - uuids.keys() if uuids else set()
    found = []
    for name in sorted({*uuids, *hidden}) if hidden else uuids:
        folder = (root / _DEVICES / name).resolve()
        found.append(Gpu(name, _path(folder), _node(folder), uuids.get(name, "")))
    return tuple(found)


def _cards(root: Path) -> tuple[Card, ...]:
    """Return the ports that are up: InfiniBand's, and where there are none, those of RDMA over Ethernet."""
    found: dict[str, list[Card]] = {"InfiniBand": [], "Ethernet": []}
    for card in sorted((root / _CARDS).glob("*"), key=lambda folder: _natural(folder.name)):
        folder = (card / "device").resolve()
        # The kernel counts the ports of a card from 0 here, from 1 there.
        interfaces = {
            int(fact(interface / "dev_port") or 0) + 1: interface.name
            for interface in sorted((card / "device/net").glob("*"), reverse=True)
        }
        for port in sorted((card / "ports").glob("[0-9]*"), key=lambda folder: int(folder.name)):
            link = fact(port / "link_layer")
            path, number = _path(folder), int(port.name)
            # Without a way on the bus it is a program that plays a card.
            if path and "ACTIVE" in fact(port / "state").split() and link in found:
                interface = interfaces.get(number, "")
                found[link].append(Card(card.name, path, _node(folder), number, interface))
    return tuple(found["InfiniBand"] or found["Ethernet"])


def _path(folder: Path) -> tuple[str, ...]:
    """Cut a device's folder, .../devices/pci0000:00/0000:00:01.1/0000:07:00.0, down to the PCI bus."""
    parts = folder.parts
    bridge = next((place for place, part in enumerate(parts) if _BRIDGE.fullmatch(part)), len(parts))
    return parts[bridge:]


def _node(folder: Path) -> int:
    text = fact(folder / "numa_node")
    return int(text) if text else UNKNOWN


def _natural(name: str) -> list[str | int]:
    """Return a sort key that puts mlx5_2 before mlx5_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
