"""Prediction of a training step on many GPUs: exposed all-reduce, and waiting for stragglers.

When gradients are ready is measured on one rank of the real network, as a fraction of backward: work done
over all work, which depends little on the machine. `stock` is Horovod's optimizer: one message per tensor,
which is cast and may be fused. `ours` sends one message per bucket, never fused. Both use Horovod's cycles
and negotiation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.bench.comparison import one_thread
from horovod_volo.bench.scaling_study.constants import constant
from horovod_volo.bench.scaling_study.network import Fabric, all_reduce_seconds
from horovod_volo.bench.synthetic import CLASSES
from horovod_volo.cluster.reducer import build_gradient_buckets, message_bytes
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import build_model, spec_of, training_forward

System = Literal["stock", "ours"]
SYSTEMS: tuple[System, ...] = ("stock", "ours")
PredictedModel = Literal["volo_d1", "volo_d5"]  # whose step times the constants have
MODELS: tuple[PredictedModel, ...] = ("volo_d1", "volo_d5")
_BYTES = 2  # per parameter: sent in fp16
_REPEATS = 3  # of the measured backward
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


def measured_gradient_times(model: str, img_size: int, repeats: int = _REPEATS) -> GradientTimes:
    """Run backward several times after a warm-up; each gradient's fraction is the median."""
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).train()
    parameters = dict(network.named_parameters())
    heads = spec_of(model).heads
    buckets = build_gradient_buckets(parameters, Exchange(), heads=heads, ranks=2, shards=1)
    with one_thread():
        fractions = _ready_fractions(network, img_size, repeats)
    tensors = [Message(ready, _BYTES * parameters[name].numel()) for name, ready in fractions.items()]
    messages = [
        Message(max(fractions[name] for name in bucket.parameters), message_bytes(bucket, Exchange()))
        for bucket in buckets
    ]
    count = sum(parameter.numel() for parameter in parameters.values())
    return GradientTimes(model, count, tuple(sorted(tensors)), tuple(sorted(messages)))


def _ready_fractions(network: nn.Module, img_size: int, repeats: int) -> dict[str, float]:
    """Return the median fraction of each gradient by name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    ready: dict[str, float] = {}

    def note(parameter: Tensor) -> None:
        ready[names[parameter]] = perf_counter()

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    images, fractions = torch.randn(1, 3, img_size, img_size), []
    for _ in range(repeats + 1):
        class_logits, token_logits = training_forward(network)(images, lambda tokens: tokens, 0)
        began = perf_counter()
        (class_logits.sum() + token_logits.sum()).backward()  # type: ignore[no-untyped-call]
        lasted = perf_counter() - began
        fractions.append([(ready[name] - began) / lasted for name in ready])
        network.zero_grad()
    return dict(zip(ready, np.median(fractions[1:], axis=0).tolist(), strict=True))


class Assumed(NamedTuple):
    """Assumptions of a prediction besides the fabric."""

    sigma: float  # standard deviation of a rank's step, as a fraction
    negotiation_per_level: float  # seconds, times log2 of the ranks
    cycle: float  # seconds
    step_seconds: float  # of one GPU alone
    copy_rate: float  # bytes per second of its memory


def predicted_step(
    workload: GradientTimes, fabric: Fabric, ranks: int, system: System, assumed: Assumed
) -> float:
    """Return the seconds of a step on so many ranks."""
    alone = assumed.step_seconds
    backward = constant("backward fraction") * alone
    # Casts and copies run on the device between backward's kernels, on any number of ranks.
    copied = constant(f"{system} passes") * workload.parameters
    parts = workload.buckets if system == "ours" else workload.tensors
    # A message is submitted after the Python code of all submissions before it.
    hook = constant("hook") if system == "stock" else 0.0
    messages = [
        Message(alone - backward + max(part.ready * backward, number * hook), part.size)
        for number, part in enumerate(parts, 1)
    ]
    channel = Channel(
        period=assumed.cycle,
        negotiation=assumed.negotiation_per_level * math.log2(ranks),
        fusion_bytes=constant("horovod fusion" if system == "stock" else "our fusion"),
        blocks=False,  # NCCL's work is only queued
    )
    seconds = partial(all_reduce_seconds, ranks=ranks, fabric=fabric)
    phases = [assumed.cycle * number / _PHASES for number in range(_PHASES)]
    end = statistics.fmean(end_of_exchange(messages, channel, seconds, phase) for phase in phases)
    exposed = max(0.0, end - alone) + copied / assumed.copy_rate
    return alone + exposed + alone * assumed.sigma * expected_largest(ranks)


def expected_largest(ranks: int) -> float:
    """Return the mean of the largest of N standard normal draws: how late the slowest rank is, in sigmas.

    The integral of 1 - F^N above zero minus that of F^N below zero.
    """
    x = torch.linspace(0.0, _LIMIT, _POINTS, dtype=torch.float64)
    above, below = torch.special.ndtr(x), torch.special.ndtr(-x)
    return float(torch.trapezoid(1 - above**ranks - below**ranks, x))


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
        wait = messages[number].ready - now
        if wait > 0:  # until the first cycle that finds the message; rounding must not put it just before it
            cycles = math.ceil(wait / period) * period if period else 0.0
            now = max(now + cycles, messages[number].ready)
        sizes: list[float] = []  # of what is sent in this cycle
        while number < len(messages) and messages[number].ready <= now:
            size = messages[number].size
            if sizes and sizes[-1] + size <= channel.fusion_bytes:
                sizes[-1] += size
            else:
                sizes.append(size)
            number += 1
        agreed = now + channel.negotiation
        for size in sizes:
            follows = 0.0 < free >= agreed
            free = max(agreed, free) + seconds(size) - (channel.hidden if follows else 0.0)
        now = max(now + period, free if channel.blocks else agreed)
    return free
