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
_PACKAGES = {"util-linux": ("setpriv", "unshare", "nsenter"), "iproute2": ("ip", "tc")}
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
_SHAPE = f"root tbf burst 128kb limit {2**27} rate"


def missing_for_namespaces() -> list[str]:
    """Name the programs that are not installed, with their packages, and root where this is another user."""
    programs = [(name, package) for package, names in _PACKAGES.items() for name in names]
    missing = [f"{name} (of {package})" for name, package in programs if not shutil.which(name)]
    return [*missing, *(["root, to make a network namespace"] if os.geteuid() != 0 else [])]


def shaped_loopback(mbit: float, command: str) -> list[str]:
    """Return the command that runs a shell command on a loopback of `mbit` megabits a second in total.

    The end of the process namespace ends all that was started inside.
    """
    shape = f"tc qdisc add dev lo root tbf rate {mbit:g}mbit burst 1mb latency 100ms"
    script = "\n".join([_SIMPLE_TCP, "ip link set lo up", shape, f"exec {command}"])
    isolated = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    return [*_KILLED_WITH_PARENT, *isolated, "sh", "-ec", script]


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
        raise _not_possible(f"Missing: {'; '.join(missing)}")
    with contextlib.ExitStack() as undo:
        switch = undo.enter_context(_namespace(_SWITCH))
        hosts = []
        for place in range(1, number + 1):
            address, port = f"10.78.0.{place}", f"port{place}"
            host = NetworkHost(address, undo.enter_context(_namespace(_HOST, address)))
            # Traffic that enters the link is shaped at either end.
            _run_in(
                switch,
                f"ip link add dev {port} type veth peer name {INTERFACE} netns {host.pid}",
                f"ip link set dev {port} master lan up",
                f"tc qdisc add dev {port} {_SHAPE} {mbit:g}mbit",
            )
            _run_in(
                host.pid,
                f"ip address add {address}/24 dev {INTERFACE}",
                f"ip link set dev {INTERFACE} up",
                f"tc qdisc add dev {INTERFACE} {_SHAPE} {mbit:g}mbit",
            )
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
                raise _not_possible(line.strip())
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def _run_in(pid: int, *commands: str) -> None:
    """Run commands in the network of a process."""
    inside = ("nsenter", "--target", str(pid), "--net", "sh", "-exc", "\n".join(commands))
    done = subprocess.run(inside, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise _not_possible(done.stderr.strip())


def _not_possible(reason: str) -> UserError:
    return UserError(
        f"Hosts on links of a given rate cannot be made here: {reason}. Measure this machine alone: --mbit 0."
    )
