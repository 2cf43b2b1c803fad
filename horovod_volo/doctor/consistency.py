"""Checks that all ranks have the same package versions, code, settings and time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence

from horovod_volo.cluster.world import World
from horovod_volo.core.environment import PACKAGE, code_hashes, collect_environment
from horovod_volo.doctor.finding import Finding, failure, ok, warning

# If ranks differ in one of these, they wait for each other forever or compute wrong sums. The names are
# listed because other variables of these libraries contain host addresses, which differ, and secrets.
SETTINGS = (
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET",
)

TOLERATED_SECONDS = 1.0
_CLOCK_EXCHANGES = 8

# For each exchange, the local time before this rank sent and after it had received.
ClockReadings = Sequence[tuple[float, float]]


def check_consistency(world: World) -> list[Finding]:
    """Compare versions, code and settings with rank 0's. Collective: every rank calls this."""
    if world.size == 1:
        return []
    environment = collect_environment()
    versions = {"python": environment["python"], **environment["packages"]}
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    hashes = code_hashes(PACKAGE)
    return [
        compare_versions(versions, world.broadcast_object(versions)),
        compare_code(hashes, world.broadcast_object(hashes)),
        compare_settings(settings, world.broadcast_object(settings)),
    ]


def compare_versions(mine: Mapping[str, str], rank_zero: Mapping[str, str]) -> Finding:
    """Report the packages whose versions differ from rank 0's."""
    different = "; ".join(
        f"{name} {mine[name]}, rank 0 has {version}"
        for name, version in rank_zero.items()
        if mine[name] != version
    )
    if different:
        return failure("versions", different, "Run ./tools/setup on every host, or share one .venv.")
    return ok("versions", "the same on all ranks")


def compare_code(mine: Mapping[str, str], rank_zero: Mapping[str, str]) -> Finding:
    """Report the first file that differs from rank 0's, and how many more do."""
    different = [name for name in sorted({*mine, *rank_zero}) if mine.get(name) != rank_zero.get(name)]
    if different:
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        remedy = "Check out the same commit on every host, or run from one shared folder."
        return failure("code", f"differs from rank 0's: {different[0]}{others}", remedy)
    return ok("code", f"the same on all ranks, {len(mine)} files")


def compare_settings(mine: Mapping[str, str], rank_zero: Mapping[str, str]) -> Finding:
    """Report the environment variables that differ from rank 0's."""
    different = [
        f"{name} is {mine.get(name, 'not set')}, on rank 0 {rank_zero.get(name, 'not set')}"
        for name in SETTINGS
        if mine.get(name) != rank_zero.get(name)
    ]
    if different:
        remedy = "Let the launcher pass it to all ranks: set it before horovodrun, or use mpirun -x NAME."
        return failure("settings", "; ".join(different), remedy)
    return ok("settings", "of Horovod and NCCL the same on all ranks")


def check_clocks(world: World) -> list[Finding]:
    """Compare each host's clock with rank 0's. Collective: every rank calls this.

    In an allgather no rank receives before every rank has sent. The readings of two clocks around it are
    therefore an upper and a lower bound of their difference, which more exchanges make tighter.
    """
    readings = []
    for _ in range(_CLOCK_EXCHANGES):
        sent = time.time()
        world.allgather_object(None)
        readings.append((sent, time.time()))
    by_rank = world.allgather_object((socket.gethostname(), readings))
    if len({host for host, _ in by_rank}) == 1:
        return []  # one clock
    return [assess_clock(*clock_difference(readings, by_rank[0][1]))]


def clock_difference(mine: ClockReadings, its: ClockReadings) -> tuple[float, float]:
    """Return by how many seconds my clock is ahead of the other, and the uncertainty of that."""
    least = max(my_sent - its_received for (my_sent, _), (_, its_received) in zip(mine, its, strict=True))
    most = min(my_received - its_sent for (_, my_received), (its_sent, _) in zip(mine, its, strict=True))
    return (least + most) / 2, (most - least) / 2


def assess_clock(ahead: float, uncertainty: float) -> Finding:
    """Report a clock that is certainly more than the tolerated time ahead or behind."""
    if abs(ahead) - uncertainty > TOLERATED_SECONDS:
        direction = "ahead of" if ahead > 0 else "behind"
        return warning(
            "clock",
            f"{abs(ahead):.2f} s {direction} rank 0's (+/- {uncertainty:.2f} s): times in logs and of files "
            "cannot be compared",
            "Synchronize the hosts' clocks with NTP; see `timedatectl` on each.",
        )
    return ok("clock", f"within {TOLERATED_SECONDS:g} s of rank 0's")
