"""The topology of a host: cores, NUMA nodes and network cards (NICs) from /sys, and GPUs from NVML, which is
the library of NVIDIA's driver.

No torch and no CUDA: this is read before anything that starts threads is imported. Files that are missing, as
in a container or a virtual machine, leave the corresponding fields empty or unknown.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, dropwhile, takewhile
from pathlib import Path

import pynvml

UNKNOWN = -1
_DEVICES = "sys/bus/pci/devices"
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor, and the first byte of the class of display controllers
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_LOCAL, _FAR = 10, 255  # the kernel's distance of a node to itself, and to an unreachable one


@dataclass(frozen=True)
class Device:
    """A device on the PCI bus, such as a GPU."""

    name: str  # of a GPU: its PCI address
    path: tuple[str, ...]  # from the root bridge down to the device
    node: int  # NUMA node, or UNKNOWN


@dataclass(frozen=True)
class Nic(Device):
    """A port of a network card that supports RDMA; its name is that of InfiniBand's tools."""

    port: int = 1
    interface: str = ""  # network interface; empty without one

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


@dataclass(frozen=True)
class Host:
    """CPUs, GPUs and NICs of one machine."""

    cores: tuple[tuple[int, ...], ...]  # physical cores, each with the CPU numbers of its hardware threads
    nodes: dict[int, tuple[int, ...]]  # CPUs of each NUMA node
    distances: dict[int, dict[int, int]]  # between NUMA nodes
    gpus: tuple[Device, ...]  # in the driver's order
    nics: tuple[Nic, ...]


def read_host(root: Path = Path("/"), driver_gpus: Sequence[tuple[str, str]] = ()) -> Host:
    """Read the host whose /sys lies below `root`; `driver_gpus` are PCI addresses and UUIDs from NVML."""
    folder = root / "sys/devices/system"
    numbers = sorted(int(node.name[4:]) for node in (folder / "node").glob("node[0-9]*"))

    def read(file: str) -> str:
        return read_text_or_empty(folder / file)

    nodes = {number: cpu_list(read(f"node/node{number}/cpulist")) for number in numbers}
    # A row has one number for each online node, in ascending order of nodes.
    rows = {number: map(int, read(f"node/node{number}/distance").split()) for number in numbers}
    online = cpu_list(read("cpu/online")) or tuple(sorted(chain(*nodes.values())))
    siblings = [set(cpu_list(read(f"cpu/cpu{cpu}/topology/thread_siblings_list"))) for cpu in online]
    cores = {tuple(sorted(core & set(online))) or (cpu,) for cpu, core in zip(online, siblings, strict=True)}
    return Host(
        cores=tuple(sorted(cores)),
        nodes=nodes if any(nodes.values()) else {0: online},
        distances={number: dict(zip(numbers, row, strict=False)) for number, row in rows.items()},
        gpus=_gpus(root, driver_gpus),
        nics=_nics(root),
    )


def distance(host: Host, one: Device, other: Device) -> tuple[int, int, int]:
    """Return the distance of two devices, for comparison: shared bridges first, then hops, then NUMA nodes.

    It increases in the order: same switch, same root bridge, same NUMA node, same socket, other socket.
    """
    pairs = zip(one.path, other.path, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    hops = len(one.path) + len(other.path) if shared else 0
    return -shared, hops, node_distance(host, one.node, other.node)


def node_distance(host: Host, one: int, other: int) -> int:
    """Return the distance of two NUMA nodes in the kernel's units."""
    if one == other and one != UNKNOWN:
        return _LOCAL
    return host.distances.get(one, {}).get(other, _FAR)


def read_text_or_empty(file: Path) -> str:
    """Return the stripped text of a file, as in /sys and /proc; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format, as in "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def cpu_ranges(numbers: Iterable[int]) -> str:
    """Format numbers in the kernel's list format, as in "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def kernel_address(text: str) -> str:
    """Return a PCI address in the kernel's form: four digits of the domain, where the driver has eight."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def gpus_on_bus(root: Path = Path("/")) -> set[str]:
    """Return the PCI addresses of NVIDIA GPUs; this needs no driver."""
    return {
        folder.name
        for folder in (root / _DEVICES).glob("*")
        if read_text_or_empty(folder / "vendor") == _NVIDIA
        and read_text_or_empty(folder / "class").startswith(_DISPLAY)
    }


def _gpus(root: Path, driver_gpus: Sequence[tuple[str, str]]) -> tuple[Device, ...]:
    """Return the GPUs that the driver lists, and those that a cgroup hides from the driver."""
    names = [kernel_address(address) for address, _ in driver_gpus]
    if names and (hidden := gpus_on_bus(root).difference(names)):
        names = sorted({*names, *hidden})
    folders = [(root / _DEVICES / name).resolve() for name in names]
    return tuple(Device(folder.name, _pci_path(folder), _numa_node(folder)) for folder in folders)


def _nics(root: Path) -> tuple[Nic, ...]:
    """Return the active InfiniBand ports; without any, the active ports for RDMA over Ethernet."""
    by_link: dict[str, list[Nic]] = {"InfiniBand": [], "Ethernet": []}
    # mlx5_2 before mlx5_10
    for nic in sorted((root / "sys/class/infiniband").glob("*"), key=lambda nic: (len(nic.name), nic.name)):
        folder = (nic / "device").resolve()
        # The kernel counts the ports of a card from 0 in dev_port, and from 1 below ports/.
        interfaces = {
            int(read_text_or_empty(interface / "dev_port") or 0) + 1: interface.name
            for interface in sorted((nic / "device/net").glob("*"), reverse=True)
        }
        for port in sorted((nic / "ports").glob("[0-9]*"), key=lambda folder: int(folder.name)):
            link = read_text_or_empty(port / "link_layer")
            path, number = _pci_path(folder), int(port.name)
            # Without a path on the PCI bus this is software RDMA.
            if path and "ACTIVE" in read_text_or_empty(port / "state").split() and link in by_link:
                interface = interfaces.get(number, "")
                by_link[link].append(Nic(nic.name, path, _numa_node(folder), number, interface))
    return tuple(by_link["InfiniBand"] or by_link["Ethernet"])


def _pci_path(folder: Path) -> tuple[str, ...]:
    """Return the part of .../devices/pci0000:00/0000:00:01.1/0000:07:00.0 from the root bridge on."""
    return tuple(dropwhile(lambda part: not _BRIDGE.fullmatch(part), folder.parts))


def _numa_node(folder: Path) -> int:
    return int(read_text_or_empty(folder / "numa_node") or UNKNOWN)


def list_gpus() -> list[tuple[str, str]]:
    """Return PCI address and UUID of each GPU; nothing without a driver."""
    gpus = []
    with _nvml() as available:
        for index in range(pynvml.nvmlDeviceGetCount() if available else 0):
            with suppress(pynvml.NVMLError):  # a GPU that has failed does not hide the others
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append((pynvml.nvmlDeviceGetPciInfo(handle).busId, pynvml.nvmlDeviceGetUUID(handle)))
    return gpus


def driver_versions() -> tuple[str, int]:
    """Return the driver's version and the newest CUDA that it supports, as 12040 for 12.4; else "" and 0."""
    version, cuda = "", 0
    with _nvml() as available:
        if available:
            version = pynvml.nvmlSystemGetDriverVersion()
            cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    return version, cuda


@contextmanager
def _nvml() -> Iterator[bool]:
    """Initialize NVML inside the block; yield False where there is no driver. An error ends the block."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    with suppress(pynvml.NVMLError):
        try:
            yield True
        finally:
            pynvml.nvmlShutdown()
