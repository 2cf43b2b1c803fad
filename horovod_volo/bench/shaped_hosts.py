"""Hosts made of network namespaces of this machine, each on a link of a given rate both ways.

They share processors, memory and files; only the network is each one's own. Nothing outlives the process
that makes them, even where it is killed: namespaces have no names, and the kernel ends their processes.
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
_NETWORK, _NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_PATIENCE_SECONDS = 20
_ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
# A network of which every packet arrives can do with plain congestion control. One that probes for the rate,
# as the machine's own may, takes a tenth more or less from one exchange to the next. And what waits at a link
# to leave is kept short, or acknowledgements would wait behind it.
SIMPLE_TCP = """
cd /proc/sys/net/ipv4
echo reno >tcp_congestion_control
echo 0 >tcp_slow_start_after_idle
echo 131072 >tcp_limit_output_bytes
"""
# $1 is the host's name: its address, for gloo asks where a host's name leads, and an address leads to itself.
# IPv6 off: gloo would take whichever address of the interface comes first.
_HOST = f"""
{SIMPLE_TCP}
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
echo "$1" >/proc/sys/kernel/hostname
ip link set lo up && echo ready && exec sleep infinity
"""
_SWITCH = "ip link add lan type bridge && ip link set lan up && echo ready && exec sleep infinity"
# A bucket of two large packets: more would go through at the machine's speed after each pause. A queue that
# never overflows: where many send to one, packets would be lost, and the server would look worse than it is.
_SHAPE = ("root", "tbf", "burst", "128kb", "limit", str(2**27), "rate")


@dataclass(frozen=True)
class Host:
    """One host, seen from outside."""

    address: str
    pid: int  # of the process that holds its network

    def enter(self) -> None:
        """Move this process to the host: what it opens from now on, it opens there."""
        descriptor = os.pidfd_open(self.pid)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NETWORK | _NAME):
            raise OSError(ctypes.get_errno(), f"host {self.address} cannot be entered")
        os.close(descriptor)


@contextlib.contextmanager
def shaped_hosts(number: int, mbit: float) -> Iterator[list[Host]]:
    """Make hosts on links of `mbit` megabits a second; they are gone at the end, whatever happens."""
    _check()
    with contextlib.ExitStack() as undo:
        switch = undo.enter_context(_namespace(_SWITCH))
        hosts = []
        for place in range(1, number + 1):
            address = f"10.78.0.{place}"
            host = Host(address, undo.enter_context(_namespace(_HOST, address)))
            _connect(host, switch, f"port{place}", mbit)
            hosts.append(host)
        yield hosts


def _check() -> None:
    missing = sorted({package for name, package in _PACKAGES.items() if shutil.which(name) is None})
    if os.getuid() != 0 or missing:
        install = f" and: apt-get install {' '.join(missing)}" if missing else ""
        raise UserError(
            f"Hosts on links of a given rate are made by root{install}. Without them measure this machine "
            "alone: --mbit 0."
        )


@contextlib.contextmanager
def _namespace(script: str, *words: str) -> Iterator[int]:
    """Start a process with a network and a host name of its own; return its number once it is ready."""
    with subprocess.Popen(
        [*_ENDS_WITH_ITS_PARENT, "unshare", "--net", "--uts", "sh", "-c", script, "sh", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if said != "ready\n":
                raise UserError(
                    f"This machine makes no network namespaces ({said.strip()}). Measure it alone: --mbit 0."
                )
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def _connect(host: Host, switch: int, port: str, mbit: float) -> None:
    """Lay a cable from a host to the switch, and shape what enters it at either end."""
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
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    if done.returncode:
        raise UserError(
            f"A network of hosts cannot be made here: {' '.join(words)}: {done.stderr.strip()}. Measure this "
            "machine alone: --mbit 0."
        )
