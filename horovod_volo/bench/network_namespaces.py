"""Networks of a given rate, emulated on this machine by Linux network namespaces; needs root.

`shaped_hosts` makes hosts, each on a link of its own; `shaped_loopback` is the start of a command that runs
in a namespace whose loopback has the rate. Processors, memory and files are shared. Nothing outlives the
process that makes them, even where it is killed: the namespaces have no names, and the kernel ends their
processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from horovod_volo.core.errors import UserError

INTERFACE = "eth0"
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_PACKAGES = {
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
}
_TIMEOUT_SECONDS = 20
_KILLED_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# No packet is lost here, so plain congestion control is enough; one that probes for the rate makes exchanges
# a tenth faster or slower. The queue of unsent packets is short, as acknowledgements would wait behind it.
_SIMPLE_TCP = """
cd /proc/sys/net/ipv4
echo reno >tcp_congestion_control
echo 0 >tcp_slow_start_after_idle
echo 131072 >tcp_limit_output_bytes
"""
# $1 is the host's name and also its address: gloo resolves the name, and an address resolves to itself.
# Without IPv6: gloo takes the first address of the interface, whichever that is.
_HOST = f"""
{_SIMPLE_TCP}
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
echo "$1" >/proc/sys/kernel/hostname
ip link set lo up && echo ready && exec sleep infinity
"""
_SWITCH = "ip link add lan type bridge && ip link set lan up && echo ready && exec sleep infinity"
# The bucket holds two large packets: a larger one would pass more at full speed after each pause. The queue
# never overflows: where many send to one, lost packets would make the server look slower than it is.
_SHAPE = ("root", "tbf", "burst", "128kb", "limit", str(2**27), "rate")


def missing_for_namespaces() -> list[str]:
    """Name the programs that are not installed, with their packages, and root where this is another user."""
    missing = [f"{name} (of {package})" for name, package in _PACKAGES.items() if not shutil.which(name)]
    return [*missing, *(["root, to make a network namespace"] if os.geteuid() != 0 else [])]


def shaped_loopback(mbit: float, command: str) -> list[str]:
    """Return the command that runs a shell command on a loopback of `mbit` megabits a second in total.

    The end of the process namespace ends all that was started inside.
    """
    script = [
        _SIMPLE_TCP,
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {mbit:g}mbit burst 1mb latency 100ms",
        f"exec {command}",
    ]
    isolated = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    return [*_KILLED_WITH_PARENT, *isolated, "sh", "-ec", "\n".join(script)]


@dataclass(frozen=True)
class NetworkHost:
    """One emulated host."""

    address: str
    pid: int  # of the process that keeps its network namespace open

    def enter(self) -> None:
        """Move this process into the host's network."""
        descriptor = os.pidfd_open(self.pid)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET | _CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"host {self.address} cannot be entered")
        os.close(descriptor)


@contextlib.contextmanager
def shaped_hosts(number: int, mbit: float) -> Iterator[list[NetworkHost]]:
    """Make hosts on links of `mbit` megabits a second in each direction, removed at the end in every case."""
    if missing := missing_for_namespaces():
        raise UserError(
            f"Hosts on links of a given rate cannot be made here. Missing: {'; '.join(missing)}. "
            "Without them measure this machine alone: --mbit 0."
        )
    with contextlib.ExitStack() as undo:
        switch = undo.enter_context(_namespace(_SWITCH))
        hosts = []
        for place in range(1, number + 1):
            address = f"10.78.0.{place}"
            host = NetworkHost(address, undo.enter_context(_namespace(_HOST, address)))
            _connect(host, switch, f"port{place}", mbit)
            hosts.append(host)
        yield hosts


@contextlib.contextmanager
def _namespace(script: str, *words: str) -> Iterator[int]:
    """Start a process with a network and a host name of its own; yield its id once it is ready."""
    with subprocess.Popen(
        [*_KILLED_WITH_PARENT, "unshare", "--net", "--uts", "sh", "-c", script, "sh", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != "ready\n":
                raise UserError(
                    f"This machine makes no network namespaces ({line.strip()}). Measure it alone: --mbit 0."
                )
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def _connect(host: NetworkHost, switch: int, port: str, mbit: float) -> None:
    """Connect a host to the switch, and shape the traffic that enters the link at either end."""
    at_switch = ("nsenter", "--target", str(switch), "--net")
    at_host = ("nsenter", "--target", str(host.pid), "--net")
    peer = ("peer", "name", INTERFACE, "netns", str(host.pid))
    _run(*at_switch, "ip", "link", "add", "dev", port, "type", "veth", *peer)
    _run(*at_switch, "ip", "link", "set", "dev", port, "master", "lan", "up")
    _run(*at_host, "ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*at_host, "ip", "link", "set", "dev", INTERFACE, "up")
    for place, device in ((at_switch, port), (at_host, INTERFACE)):
        _run(*place, "tc", "qdisc", "add", "dev", device, *_SHAPE, f"{mbit:g}mbit")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise UserError(
            f"A network of hosts cannot be made here: {' '.join(words)}: {done.stderr.strip()}. Measure this "
            "machine alone: --mbit 0."
        )
