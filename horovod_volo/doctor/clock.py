"""How far the hosts' clocks are apart: times in logs and of checkpoints are compared between them.

When ranks exchange something, each has sent before any has received. So a send on one rank came before
the receipt on every other, and their clocks' readings bound the difference: from both sides, and closer
with every exchange.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from horovod_volo.cluster.world import World
from horovod_volo.doctor.finding import Finding, ok, warning

TOLERATED_SECONDS = 1.0
_EXCHANGES = 8

Readings = Sequence[tuple[float, float]]  # when a rank sent, and when it had received, by exchange


def look_at_clocks(world: World) -> list[Finding]:
    """Compare each host's clock with rank 0's. Collective: every rank calls this."""
    readings = []
    for _ in range(_EXCHANGES):
        sent = time.time()
        world.allgather_object(None)
        readings.append((sent, time.time()))
    seen = world.allgather_object((socket.gethostname(), readings))
    if len({host for host, _ in seen}) == 1:
        return []  # one clock
    ahead, uncertain = ahead_of(readings, seen[0][1])
    return [judge_clock(ahead, uncertain)]


def ahead_of(mine: Readings, its: Readings) -> tuple[float, float]:
    """Return by how many seconds my clock is ahead of its, and how uncertain that is."""
    least = max(my_sent - its_received for (my_sent, _), (_, its_received) in zip(mine, its, strict=True))
    most = min(my_received - its_sent for (_, my_received), (its_sent, _) in zip(mine, its, strict=True))
    return (least + most) / 2, (most - least) / 2


def judge_clock(ahead: float, uncertain: float) -> Finding:
    """Say whether a clock is right enough."""
    if abs(ahead) - uncertain > TOLERATED_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        return warning(
            "clock",
            f"{abs(ahead):.2f} s {way} rank 0's (to {uncertain:.2f} s): times in logs and of files mislead",
            "Let the hosts keep time by NTP: see `timedatectl` on each.",
        )
    return ok("clock", f"within {TOLERATED_SECONDS:g} s of rank 0's")
