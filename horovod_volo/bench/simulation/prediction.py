"""A training step on many GPUs: what of the exchange backward does not hide, and who all wait for.

`stock` is Horovod's optimizer: one message a tensor, cast and fused as it goes. `ours` is a message a
bucket, never fused. Both go through Horovod's cycles and agreements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from horovod_volo.bench.simulation.collectives import Fabric, all_reduce_seconds
from horovod_volo.bench.simulation.constants import constant
from horovod_volo.bench.simulation.stragglers import expected_largest
from horovod_volo.bench.simulation.timeline import Channel, Message, end_of_exchange

System = Literal["ours", "stock"]
_PHASES = 8  # where in a cycle a step begins is by chance: the mean over these


@dataclass(frozen=True)
class Workload:
    """A network's gradients: bytes on the wire, and at what share of backward they are there."""

    name: str
    parameters: int
    tensors: tuple[Message, ...]
    buckets: tuple[Message, ...]


@dataclass(frozen=True)
class Assumed:
    """What a prediction takes as given, besides the fabric."""

    sigma: float  # of a rank's step
    negotiation_per_level: float  # seconds, times log2 of the ranks
    cycle: float  # seconds
    step_seconds: float  # of one GPU alone
    copy_rate: float  # bytes a second of its memory


class Prediction(NamedTuple):
    """A step on all ranks."""

    step_seconds: float
    efficiency: float  # one GPU's step over this one
    exposed_seconds: float  # of the exchange
    waiting_seconds: float  # for the slowest


def predict(workload: Workload, fabric: Fabric, ranks: int, system: System, assumed: Assumed) -> Prediction:
    """Compute a step of so many ranks."""
    alone = assumed.step_seconds
    backward = constant("backward share") * alone
    # On the device between backward's kernels, whatever the ranks.
    passes = constant("our passes" if system == "ours" else "stock passes") * workload.parameters
    messages = _messages(workload, system, alone - backward, backward)
    channel = Channel(
        period=assumed.cycle,
        agreement=assumed.negotiation_per_level * math.log2(ranks),
        fusion_bytes=constant("horovod fusion" if system == "stock" else "our fusion"),
        waits=False,  # NCCL's work is only queued
    )
    ends = [
        end_of_exchange(
            messages,
            channel,
            lambda size: all_reduce_seconds(size, ranks, fabric),
            phase=assumed.cycle * number / _PHASES,
        )
        for number in range(_PHASES)
    ]
    exposed = max(0.0, statistics.fmean(ends) - alone) + passes / assumed.copy_rate
    waiting = alone * assumed.sigma * expected_largest(ranks)
    step = alone + exposed + waiting
    return Prediction(step, alone / step, exposed, waiting)


def _messages(workload: Workload, system: System, start: float, backward: float) -> Sequence[Message]:
    parts = workload.buckets if system == "ours" else workload.tensors
    # A message cannot be called for before the Python of all calls before it has run.
    hook = constant("hook") if system == "stock" else 0.0
    return [
        Message(start + max(part.ready * backward, number * hook), part.size)
        for number, part in enumerate(parts, 1)
    ]
