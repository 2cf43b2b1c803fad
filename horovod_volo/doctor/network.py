"""Checks the network interfaces of a host and the speed of allreduce between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from horovod_volo.cluster.network import AllreduceSpeed, Interface, list_interfaces, measure_allreduce
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.doctor.finding import Finding, failure, ok, warning

# Limits that only a defect exceeds; a good network is far from them.
_MIN_FRACTION_OF_LINE = 0.05
_MIN_BYTES_PER_SECOND = 50e6  # if the speed of the interface is unknown: less than half a gigabit
_MAX_SECONDS, _MAX_CYCLES = 0.02, 10  # of the latency, which has a part in Horovod's cycles
_CHOOSE_INTERFACE = (
    "Name the fast interface: horovodrun --network-interface NAME, or mpirun -mca btl_tcp_if_include NAME. "
    "Check that no other jobs run on these hosts."
)


def check_interfaces() -> list[Finding]:
    """List this host's network interfaces, and check that gloo's exists."""
    interfaces = list_interfaces()
    usable = [one for one in interfaces if one.up or one.address]
    findings = [
        ok("network", f"{socket.gethostname()}: {', '.join(map(str, usable)) or 'only the loopback'}")
    ]
    gloo_interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if gloo_interface not in ("", "lo", *(one.name for one in usable)):
        findings.append(
            failure(
                "network",
                f"HOROVOD_GLOO_IFACE is {gloo_interface}, which is missing or down on {socket.gethostname()}",
                f"Name one that is up: {', '.join(one.name for one in usable) or 'lo'}.",
            )
        )
    return findings


def check_allreduce(world: World) -> list[Finding]:
    """Time allreduce on the devices that training uses. Collective: every rank calls this."""
    if world.size == 1:
        return []
    resources = rank_resources(world)
    speed = measure_allreduce(world, resources.device)
    hosts = world.allgather_object((socket.gethostname(), _fastest_megabits(list_interfaces())))
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
        return [
            failure(
                "ring",
                "sums over all ranks are wrong",
                "Run with NCCL_DEBUG=WARN; use the same Horovod, NCCL and driver on every rank.",
            )
        ]
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
        text = (
            f"{measured}: with a cycle time of {cycle_seconds * 1000:g} ms, less than "
            f"{max_latency * 1000:.0f} ms was expected"
        )
        remedy = (
            "Look for other processes on the hosts' cores, and for idle ranks with HOROVOD_LOG_LEVEL=debug."
        )
        findings.append(warning("ring", text, remedy))
    return findings or [ok("ring", measured)]


def _fastest_megabits(interfaces: Sequence[Interface]) -> int:
    return max((one.megabits for one in interfaces if one.up), default=0)


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"
