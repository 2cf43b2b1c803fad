"""Writes the /sys files of a described machine below a folder.

`topologies/NAME.txt` describes a machine, one file or property per line; paths have no leading slash:

    # comment
    sys/devices/system/node/node0/cpulist = 0-15            a file and its content
    sys/devices/system/cpu/cpu{0..7}/siblings = {n},{n+8}   one for each n from 0 to 7
    sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0
    gpu = 00000000:01:00.0 GPU-1                            address and uuid, in NVML's order

Two short forms describe all files of a PCI device, and of one port of a NIC:

    pci pci0000:00/0000:00:01.0/0000:01:00.0 = 0 0x030200 0x10de    NUMA node, class, vendor
    port mlx5_0 1 0000:02:00.0 = ib0; 4: ACTIVE; InfiniBand; 200 Gb/sec (4X HDR)

The pci line of a NIC precedes the lines of its ports.
"""

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from horovod_volo.cluster.topology import Host, read_host

MACHINES = Path(__file__).parent / "topologies"
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
NUMBER = re.compile(r"\{n([+-]\d+)?\}")


@cache
def host_of(machine: str) -> Host:
    """Return what the package reads of a machine."""
    with tempfile.TemporaryDirectory() as folder:
        return read_host(*lay_out(machine, Path(folder)))


def lay_out(machine: str, folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Write a machine's files below an empty folder; return the folder and each GPU's address and uuid."""
    gpus = []
    for left, sign, right in _entries((MACHINES / f"{machine}.txt").read_text(encoding="utf-8")):
        if left == "gpu":
            address, uuid = right.split()
            gpus.append((address, uuid))
        elif sign == "->":
            _link(folder / left, right)
        elif left.startswith("pci "):
            _device(folder, left.split()[1], *right.split())
        elif left.startswith("port "):
            _port(folder, left.split()[1:], right.split("; "))
        else:
            _files(folder, left, right)
    return folder, gpus


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("#"):
            left, sign, right = re.split(r"\s*(=|->)\s*", line, maxsplit=1)
            yield left, sign, right


def _device(folder: Path, path: str, node: str, kind: str, vendor: str) -> None:
    for name, content in (("numa_node", node), ("class", kind), ("vendor", vendor)):
        _write(folder / "sys/devices" / path / name, content)
    _link(folder / "sys/bus/pci/devices" / path.split("/")[-1], f"../../../devices/{path}")


def _port(folder: Path, device_port: list[str], properties: list[str]) -> None:
    nic, number, address = device_port
    interface, state, layer, rate = properties
    device = (folder / "sys/bus/pci/devices" / address).resolve(strict=True)
    port = device / "infiniband" / nic / "ports" / number
    for name, content in (("state", state), ("link_layer", layer), ("rate", rate)):
        _write(port / name, content)
    if interface:
        _write(device / "net" / interface / "dev_port", str(int(number) - 1))
    listed = folder / "sys/class/infiniband" / nic
    if not listed.is_symlink():  # both links exist already for the second port of a NIC
        inside = device.relative_to((folder / "sys").resolve())
        _link(device / "infiniband" / nic / "device", f"../../../{address}")
        _link(listed, f"../../{inside}/infiniband/{nic}")


def _files(folder: Path, path: str, content: str) -> None:
    found = RANGE.search(path)
    for n in range(int(found[1]), int(found[2]) + 1) if found else [0]:
        own = NUMBER.sub(lambda number, n=n: str(n + int(number[1] or 0)), content)  # type: ignore[misc]
        _write(folder / RANGE.sub(str(n), path, count=1), own)


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n", encoding="utf-8")


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
