"""Prediction of a training step on many GPUs: exposed all-reduce, and waiting for stragglers.

`stock` is Horovod's optimizer: one message per tensor, cast and fused on the way. `ours` sends one message
per bucket, never fused. Both use Horovod's cycles and negotiation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from horovod_volo.bench.scaling_study.constants import constant
from horovod_volo.bench.scaling_study.network import Fabric, all_reduce_seconds

System = Literal["stock", "ours"]
SYSTEMS: tuple[System, ...] = ("stock", "ours")
MODELS = ("volo_d1", "volo_d5")  # whose step times the constants have
_PHASES = 8  # a step begins at a random point of a cycle: the mean over these
_LIMIT, _POINTS = 10.0, 20_001  # of the integral, in standard deviations


class Message(NamedTuple):
    """Some gradients, and the time when the last of them is ready."""

    ready: float
    size: float  # bytes


class GradientTimes(NamedTuple):
    """The gradients of a network: bytes to send, and the fraction of backward after which they are ready."""

    name: str
    parameters: int
    tensors: tuple[Message, ...]
    buckets: tuple[Message, ...]


class Assumed(NamedTuple):
    """Assumptions of a prediction besides the fabric."""

    sigma: float  # standard deviation of a rank's step, as a fraction
    negotiation_per_level: float  # seconds, times log2 of the ranks
    cycle: float  # seconds
    step_seconds: float  # of one GPU alone
    copy_rate: float  # bytes per second of its memory


class Prediction(NamedTuple):
    """A step on all ranks."""

    step_seconds: float
    efficiency: float  # step of one GPU divided by this


def step_seconds(gpu: str, model: str) -> float:
    """Return the assumed step of one GPU."""
    return constant(f"{gpu} {model} step")


def predict(
    workload: GradientTimes, fabric: Fabric, ranks: int, system: System, assumed: Assumed
) -> Prediction:
    """Predict a step of so many ranks."""
    alone = assumed.step_seconds
    backward = constant("backward share") * alone
    # Casts and copies run on the device between backward's kernels, on any number of ranks.
    copied = constant(f"{system} passes") * workload.parameters
    messages = _messages(workload, system, alone - backward, backward)
    channel = Channel(
        period=assumed.cycle,
        negotiation=assumed.negotiation_per_level * math.log2(ranks),
        fusion_bytes=constant("horovod fusion" if system == "stock" else "our fusion"),
        blocks=False,  # NCCL's work is only queued
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
    exposed = max(0.0, statistics.fmean(ends) - alone) + copied / assumed.copy_rate
    step = alone + exposed + alone * assumed.sigma * expected_largest(ranks)
    return Prediction(step, alone / step)


def _messages(workload: GradientTimes, system: System, start: float, backward: float) -> Sequence[Message]:
    parts = workload.buckets if system == "ours" else workload.tensors
    # A message is submitted after the Python code of all submissions before it.
    hook = constant("hook") if system == "stock" else 0.0
    return [
        Message(start + max(part.ready * backward, number * hook), part.size)
        for number, part in enumerate(parts, 1)
    ]


def expected_largest(ranks: int) -> float:
    """Return the mean of the largest of N standard normal draws: how late the slowest rank is, in sigmas.

    The integral of 1 - F^N above zero minus that of F^N below zero.
    """
    x = np.linspace(0.0, _LIMIT, _POINTS)
    above = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    below = 1 - above  # of -x
    return float(np.trapezoid(1 - above**ranks - below**ranks, x))


class Channel(NamedTuple):
    """How Horovod's thread sends: once a cycle it negotiates what is ready, fuses it and sends it."""

    period: float  # seconds from cycle to cycle
    negotiation: float  # seconds for all ranks to agree on what is ready
    fusion_bytes: float  # largest fused message; a larger tensor is sent alone
    blocks: bool  # the thread that negotiates also sends, as on CPUs: no cycle begins meanwhile
    hidden: float = 0.0  # seconds by which a message is shorter directly behind another


def end_of_exchange(
    messages: Sequence[Message], channel: Channel, seconds: Callable[[float], float], phase: float = 0.0
) -> float:
    """Return when all messages have arrived; `seconds` is the time of a message of a size.

    Messages are in the order of their ready times. Cycles begin at `phase` and every period after it.
    """
    period = max(channel.period, channel.negotiation)
    now, free, number = phase, 0.0, 0
    while number < len(messages):
        now = _next_cycle(now, messages[number].ready, period)
        ready = []
        while number < len(messages) and messages[number].ready <= now:
            ready.append(messages[number].size)
            number += 1
        agreed = now + channel.negotiation
        for size in _fused(ready, channel.fusion_bytes):
            follows = 0.0 < free >= agreed
            free = max(agreed, free) + seconds(size) - (channel.hidden if follows else 0.0)
        now = max(now + period, free if channel.blocks else agreed)
    return free


def _next_cycle(now: float, ready: float, period: float) -> float:
    """Return the beginning of the first cycle, from `now` on, at which the message is ready."""
    if ready <= now:
        return now
    found = now + math.ceil((ready - now) / period) * period if period else ready
    return max(found, ready)  # rounding must not put it just before the message


def _fused(sizes: Sequence[float], limit: float) -> Iterator[float]:
    total = 0.0
    for size in sizes:
        if total and total + size > limit:
            yield total
            total = 0.0
        total += size
    if total:
        yield total
