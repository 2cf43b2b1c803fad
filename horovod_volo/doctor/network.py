"""The ways between ranks, and whether they are as fast as they look."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from horovod_volo.cluster.network import Interface, Speed, list_interfaces, measure
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.doctor.finding import Finding, failure, ok, warning

# Below these something is wrong; a good network is far above.
_LEAST_SHARE = 0.05  # of the line
_LEAST_BYTES_PER_SECOND = 50e6  # where the line's speed is not known: less than half a gigabit
_MOST_SECONDS, _MOST_CYCLES = 0.02, 10
_CHOOSE = (
    "Name the fast interface: horovodrun --network-interface NAME, or mpirun -mca btl_tcp_if_include NAME; "
    "look whether other jobs run on these hosts."
)


def look_at_interfaces() -> list[Finding]:
    """Look at this host's network interfaces."""
    interfaces = list_interfaces()
    useful = [one for one in interfaces if one.up or one.address]
    findings = [
        ok("network", f"{socket.gethostname()}: {', '.join(map(str, useful)) or 'the loopback alone'}")
    ]
    wanted = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if wanted not in ("", "lo", *(one.name for one in useful)):
        findings.append(
            failure(
                "network",
                f"HOROVOD_GLOO_IFACE is {wanted}, which {socket.gethostname()} lacks or has down",
                f"Name one that is up: {', '.join(one.name for one in useful) or 'lo'}.",
            )
        )
    return findings


def look_at_ring(world: World) -> list[Finding]:
    """Time sums over all ranks, where gradients will travel. Collective: every rank calls this."""
    if world.size == 1:
        return []
    resources = rank_resources(world)
    speed = measure(world, resources.device)
    hosts = world.allgather_object((socket.gethostname(), _fastest(list_interfaces())))
    between = "GPU" if resources.device.type == "cuda" else "CPU"
    lines = [megabits for _, megabits in hosts]
    slowest = min(lines) if len({host for host, _ in hosts}) > 1 else 0
    cycle = float(os.environ.get("HOROVOD_CYCLE_TIME", "1")) / 1000
    # Rank 0's measurement is everybody's: one line of the report.
    findings: list[Finding] = world.broadcast_object(judge_ring(speed, slowest, cycle, f"{between}s"))
    return findings


def judge_ring(speed: Speed, line_megabits: int, cycle_seconds: float, between: str) -> list[Finding]:
    """Hold the speed against the slowest host's fastest line, and the latency against Horovod's cycle."""
    rate, latency = speed.bytes_per_second, speed.latency_seconds
    if not speed.right:
        return [
            failure(
                "ring",
                "sums over all ranks are wrong",
                "Run with NCCL_DEBUG=WARN; give every rank the same Horovod, NCCL and driver.",
            )
        ]
    told = f"between {between}: {latency * 1000:.1f} ms for 4 bytes, {_rate(rate)} for 16 MiB"
    findings = []
    line = line_megabits * 1e6 / 8
    if line and rate < _LEAST_SHARE * line:
        text = f"{told}: less than {_LEAST_SHARE:.0%} of the {_rate(line)} that the interfaces have"
        findings.append(warning("ring", text, _CHOOSE))
    elif rate < _LEAST_BYTES_PER_SECOND:
        text = f"{told}: a gigabit line carries twice {_rate(_LEAST_BYTES_PER_SECOND)}"
        findings.append(warning("ring", text, _CHOOSE))
    most = _MOST_SECONDS + _MOST_CYCLES * cycle_seconds
    if latency > most:
        text = (
            f"{told}: at a cycle of {cycle_seconds * 1000:g} ms, less than {most * 1000:.0f} ms was expected"
        )
        remedy = "See what else runs on the hosts' cores, and that no rank sleeps: HOROVOD_LOG_LEVEL=debug."
        findings.append(warning("ring", text, remedy))
    return findings or [ok("ring", told)]


def _fastest(interfaces: Sequence[Interface]) -> int:
    return max((one.megabits for one in interfaces if one.up), default=0)


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"
