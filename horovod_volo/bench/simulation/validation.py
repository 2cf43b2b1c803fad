"""How well the simulator predicts what was measured: `bench scaling`'s recorded figures, on shaped links.

Its constants come from the ring on 2 and 3 hosts alone. What is predicted is not among them: more hosts, the
parameter server, and steps whose backward was played back.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from horovod_volo.bench.results import Record
from horovod_volo.bench.scaling import replayed
from horovod_volo.bench.simulation.calibration import Point, calibrated
from horovod_volo.bench.simulation.collectives import Fabric, parameter_server_seconds, ring_seconds
from horovod_volo.bench.simulation.constants import constant
from horovod_volo.bench.simulation.timeline import Channel, Message, end_of_exchange

CALIBRATED_ON = (2, 3)  # hosts
_EXCHANGE = re.compile(r"(\d+) hosts of ([\d.]+) Mbit/s, ([\d.]+) MiB: (ring|server)")
_PLAYED_BACK = re.compile(r"(\d+) hosts of ([\d.]+) Mbit/s: backward played back, and the ring")
_MIB = 2**20
_MILLISECONDS = 1e3


class Checked(NamedTuple):
    """A measured time and the predicted one."""

    what: str
    ranks: int
    measured: float  # seconds
    predicted: float

    @property
    def error(self) -> float:
        """Return the difference as a share of what was measured."""
        return self.predicted / self.measured - 1


def checked(record: Record) -> list[Checked]:
    """Predict what a record of `bench scaling` measured on hosts; empty where it has none."""
    exchanges = [
        (found, figure["value"] / _MILLISECONDS)
        for figure in record["figures"]
        if (found := _EXCHANGE.fullmatch(figure["label"]))
    ]
    ring = [
        Point(int(found[1]), float(found[3]) * _MIB, seconds)
        for found, seconds in exchanges
        if found[4] == "ring"
    ]
    known = [point for point in ring if point.ranks in CALIBRATED_ON]
    if len({(point.ranks, point.size) for point in known}) < 3:
        return []  # three constants want three points
    links = calibrated(known)
    ways = {"ring": ring_seconds, "server": parameter_server_seconds}
    predicted = [
        Checked(f"{found[3]} MiB, {found[4]}", ranks, seconds, ways[found[4]](size, ranks, links))
        for found, seconds in exchanges
        if (ranks := int(found[1])) not in CALIBRATED_ON or found[4] == "server"
        if (size := float(found[3]) * _MIB)
    ]
    mib = max(point.size for point in ring) / _MIB
    return predicted + _played_back(record, links, mib)


def _played_back(record: Record, links: Fabric, mib: float) -> list[Checked]:
    results = []
    for figure in record["figures"]:
        if found := _PLAYED_BACK.fullmatch(figure["label"]):
            ranks = int(found[1])
            channel = Channel(
                period=constant("horovod cycle"),
                agreement=0.0,  # part of what starting costs
                fusion_bytes=constant("our fusion"),
                waits=True,
                # Ranks that are busy with one message meet for the next without having to wait for each
                # other, while links still carry the end of the first: only its bytes take time.
                hidden=ring_seconds(0, ranks, links),
            )
            messages = [Message(ready, size) for ready, size in replayed(mib, float(found[2]))]
            end = end_of_exchange(messages, channel, partial(ring_seconds, ranks=ranks, fabric=links))
            results.append(Checked("backward played back", ranks, figure["value"] / _MILLISECONDS, end))
    return results
