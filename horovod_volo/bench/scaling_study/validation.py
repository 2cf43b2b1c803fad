"""The model against measurements: the recorded `scaling` result, and efficiencies that others published.

The constants of the emulated links are fitted to the ring on 2 and 3 hosts alone. What is predicted is not
among them: more hosts, the parameter server, and replayed steps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from horovod_volo.bench.results import Record
from horovod_volo.bench.scaling_study.constants import constant
from horovod_volo.bench.scaling_study.network import (
    FABRICS,
    Fabric,
    RingTime,
    all_reduce_seconds,
    calibrated,
    parameter_server_seconds,
    ring_seconds,
)
from horovod_volo.bench.scaling_study.prediction import Channel, Message, end_of_exchange, expected_largest
from horovod_volo.bench.scaling_study.scaling import replayed_messages

_CALIBRATED_ON = (2, 3)  # hosts
_EXCHANGE = re.compile(r"(?P<hosts>\d+) hosts of .* Mbit/s, (?P<mib>[\d.]+) MiB: (?P<method>ring|server)")
_REPLAY = re.compile(r"(?P<hosts>\d+) hosts of (?P<mbit>[\d.]+) Mbit/s: backward played back, and the ring")
_MIB = 2**20


class CheckedTime(NamedTuple):
    """A measured and a predicted time."""

    what: str
    ranks: int
    measured: float  # seconds
    predicted: float

    @property
    def error(self) -> float:
        """Return the difference relative to the measured time."""
        return self.predicted / self.measured - 1


def checked(record: Record) -> list[CheckedTime]:
    """Predict what a record of `scaling` measured on hosts; empty where it has no hosts."""
    exchanges, replays = (
        [
            (found, figure["value"] / 1e3)
            for figure in record["figures"]
            if (found := label.fullmatch(figure["label"]))
        ]
        for label in (_EXCHANGE, _REPLAY)
    )
    ring = [
        RingTime(int(found["hosts"]), float(found["mib"]) * _MIB, seconds)
        for found, seconds in exchanges
        if found["method"] == "ring"
    ]
    known = [point for point in ring if point.ranks in _CALIBRATED_ON]
    if len({(point.ranks, point.size) for point in known}) < 3:
        return []  # three constants need three points
    links = calibrated(known)
    predicted = []
    for found, seconds in exchanges:
        ranks, mib, method = int(found["hosts"]), float(found["mib"]), found["method"]
        if ranks not in _CALIBRATED_ON or method == "server":
            model = ring_seconds if method == "ring" else parameter_server_seconds
            expected = model(mib * _MIB, ranks, links)
            predicted.append(CheckedTime(f"{mib:g} MiB, {method}", ranks, seconds, expected))
    largest_mib = max(point.size for point in ring) / _MIB
    for found, seconds in replays:
        ranks = int(found["hosts"])
        end = _replay_seconds(ranks, float(found["mbit"]), largest_mib, links)
        predicted.append(CheckedTime("backward played back", ranks, seconds, end))
    return predicted


def _replay_seconds(ranks: int, mbit: float, mib: float, links: Fabric) -> float:
    channel = Channel(
        period=constant("horovod cycle"),
        negotiation=0.0,  # included in the start of a collective
        fusion_bytes=constant("our fusion"),
        blocks=True,
        # Ranks that have just finished one message start the next without waiting for each other, while links
        # still transmit the end of the first: only its bytes take time.
        hidden=ring_seconds(0, ranks, links),
    )
    messages = [Message(ready, size) for ready, size in replayed_messages(mib, mbit)]
    return end_of_exchange(messages, channel, partial(ring_seconds, ranks=ranks, fabric=links))


class Bounds(NamedTuple):
    """A published efficiency, and the model's between nothing hidden and all but the last piece hidden."""

    name: str
    published: float
    low: float
    high: float


def published_points() -> list[Bounds]:
    """Return the published efficiencies; none of the sources has all that a prediction needs."""
    hdr = FABRICS["a100-hdr"]
    # Over one network card or over eight: the article has neither that nor where the server ran.
    step, size = constant("seed step"), constant("seed gradients")
    low, high = (
        _efficiency(step, *(parameter_server_seconds(size, ranks, links) for ranks in (8, 40)))
        for links in (replace(hdr, between=constant("one card")), hdr)
    )
    seed = Bounds("VOLO-D5 on 40 of 8 A100, parameter server", constant("seed efficiency"), low, high)
    # How much of the exchange Caffe hid is not published, nor the step of one GPU.
    hop, inside, between = (constant(f"ddl {name}") for name in ("hop", "inside", "between"))
    minsky = replace(
        hdr, ranks_per_host=4, ring_hop_between=hop, tree_hop_between=hop, inside=inside, between=between
    )
    exchange = all_reduce_seconds(constant("ddl gradients"), 256, minsky)
    low, high = _bounds(constant("ddl step"), 256, 1, 0.0, exchange)
    ddl = Bounds("ResNet-50 on 256 P100, IBM DDL", constant("ddl efficiency"), low, high)
    # The loss is larger than exchange and stragglers explain: neither batch nor loader are published.
    base, exchange = (all_reduce_seconds(constant("nemo gradients"), ranks, hdr) for ranks in (8, 128))
    low, high = _bounds(constant("nemo step"), 128, 8, base, exchange)
    return [seed, ddl, Bounds("ViT-g/14 on 128 of 8 A100, NeMo", constant("nemo efficiency"), low, high)]


def _bounds(step: float, ranks: int, base_ranks: int, base: float, exchange: float) -> tuple[float, float]:
    """Return the efficiency with all of the exchange exposed, and with all of it hidden."""
    sigma = constant("sigma") * step
    base_wait, wait = sigma * expected_largest(base_ranks), sigma * expected_largest(ranks)
    return _efficiency(step, base + base_wait, exchange + wait), _efficiency(step, base_wait, wait)


def _efficiency(step: float, base: float, now: float) -> float:
    return (step + base) / (step + now)
