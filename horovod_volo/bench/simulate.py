"""Predicted efficiency of training on many GPUs. No other rank takes part.

When buckets of gradients are ready is measured on one rank of the real network, as a fraction of backward:
work done over all work, which depends little on the machine. Each bucket is one message, which Horovod
negotiates in its cycles and does not fuse. At the end all ranks wait for the slowest.

Rates are bus rates, as NCCL's tests report them: an all-reduce of S bytes takes 2(N-1)/N S over the rate. The
rate between hosts is that of all network cards of a host together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from horovod_volo.bench.results import Figure, Flag, Result
from horovod_volo.bench.synthetic import CLASSES
from horovod_volo.cluster.buckets import build_gradient_buckets, message_bytes
from horovod_volo.config.arguments import whole_number
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import build_model, spec_of, training_forward

PredictedModel = Literal["volo_d1", "volo_d5"]


class Fabric(NamedTuple):
    """Some GPUs and what connects them; times in seconds, rates in bytes per second.

    The latencies are those of NCCL's src/graph/tuning.cc: base and hardware latencies of the Simple protocol.
    Inside a host a hop of the ring costs three overheads of 2 us, which are above NVLink's 3.4 us.
    """

    name: str
    inside: float  # rate inside a host
    between: float  # rate between hosts
    ranks_per_host: int = 8
    start: float = 8.4e-6  # of each collective
    ring_hop_inside: float = 6e-6
    ring_hop_between: float = 14e-6
    tree_hop_inside: float = 4e-6
    tree_hop_between: float = 14e-6
    copy_rate: float = math.inf  # of a GPU's memory
    step_seconds: Mapping[str, float] = {}  # of one GPU alone, by model

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts of so many ranks."""
        return math.ceil(ranks / self.ranks_per_host)

    def bytes_seconds(self, size: float, ranks: int) -> float:
        """Return the time of the bytes of an all-reduce, of which each rank sends 2(N-1)/N."""
        rate = self.between if self.hosts(ranks) > 1 else self.inside
        return 2 * (ranks - 1) / ranks * size / rate


FabricName = Literal["a100-hdr", "h200-ndr"]
# Rates that others measured. A100: inside, nccl issue 1048; between, nccl issues 812 and 1576. H200: inside,
# an H100 with NVLS in nccl-tests issue 212, which has the same links; between, nccl issue 1221 (320 to 330).
# Copy rates are assumed: 0.8 and 0.9 of the data sheets' bytes per second. Steps are of 128 images, with H200
# and D1 of 256: estimates from operations and bytes at 0.60 to 0.68 of their limits, which nobody measured.
FABRICS: dict[FabricName, Fabric] = {
    "a100-hdr": Fabric(
        "DGX A100, 8 x HDR200", inside=232.5e9, between=192e9, copy_rate=1.6e12,
        step_seconds={"volo_d1": 48.9e-3, "volo_d5": 366e-3},
    ),
    "h200-ndr": Fabric(
        "8 x H200, 8 x NDR400", inside=480e9, between=330e9, copy_rate=4.3e12,
        step_seconds={"volo_d1": 36.1e-3, "volo_d5": 128e-3},
    ),
}  # fmt: skip
_BACKWARD_FRACTION = 2 / 3  # of a step; assumed: two of three multiplications
_COPIED_BYTES = 12  # read and written per parameter: one pass to fp16, one back
_PHASES = 8  # a step begins at a random point of a cycle: the mean over these


class Message(NamedTuple):
    """Some gradients, and the time when the last of them is ready."""

    ready: float
    size: float  # bytes


class GradientTimes(NamedTuple):
    """The buckets of a network: bytes to send, and the fraction of backward after which they are ready."""

    parameters: int
    buckets: tuple[Message, ...]


def measure(
    *,
    models: Annotated[Sequence[PredictedModel], Flag("models of known step time")] = ("volo_d1", "volo_d5"),
    fabrics: Annotated[Sequence[FabricName], Flag("what connects the GPUs")] = tuple(FABRICS),
    ranks: Annotated[
        Sequence[int], Flag("numbers of GPUs", read=whole_number(2, because=": one rank exchanges nothing"))
    ] = (8, 40, 256, 1024, 10_000),
    img_size: Annotated[int, Flag("side of the images of the measured backward, in pixels")] = 112,
    negotiation_us: Annotated[
        float, Flag("microseconds in which all ranks agree on a message, times log2 of the ranks")
    ] = 100.0,
    cycle_ms: Annotated[float, Flag("HOROVOD_CYCLE_TIME, in milliseconds")] = 1.0,
    sigma: Annotated[float, Flag("standard deviation of a rank's step, as a fraction of it")] = 0.005,
) -> Result:
    """Predict the efficiency of each network on each fabric."""
    workloads = {model: measured_gradient_times(model, img_size) for model in models}
    assumed = (sigma, negotiation_us / 1e6, cycle_ms / 1e3)
    figures = []
    for fabric in map(FABRICS.__getitem__, fabrics):
        for model, workload in workloads.items():
            alone = fabric.step_seconds[model]
            for count in ranks:
                step = predicted_step(workload, fabric, alone, count, *assumed)
                figures.append(Figure(f"{fabric.name}, {model}, {count} ranks", 100 * alone / step, "%"))
    title = f"predicted efficiency; spread of a step {100 * sigma:g} %"
    title += f", {negotiation_us:g} us a level to agree, {cycle_ms:g} ms cycles"
    return Result("simulate", title, figures)


def measured_gradient_times(model: str, img_size: int, repeats: int = 3) -> GradientTimes:
    """Run backward several times after a warm-up; each gradient's fraction is the median."""
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).train()
    parameters = dict(network.named_parameters())
    ready: dict[str, float] = {}

    def note(name: str, _: Tensor) -> None:
        ready[name] = perf_counter()

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
    images, measured = torch.randn(1, 3, img_size, img_size), []
    for _ in range(repeats + 1):
        class_logits, token_logits = training_forward(network)(images, lambda tokens: tokens, 0)
        began = perf_counter()
        (class_logits.sum() + token_logits.sum()).backward()  # type: ignore[no-untyped-call]
        lasted = perf_counter() - began
        measured.append([(ready[name] - began) / lasted for name in parameters])
        network.zero_grad()
    fractions = dict(zip(parameters, np.median(measured[1:], axis=0).tolist(), strict=True))
    buckets = build_gradient_buckets(parameters, Exchange(), heads=spec_of(model).heads, ranks=2, shards=1)
    messages = [
        Message(max(fractions[name] for name in bucket.parameters), message_bytes(bucket, Exchange()))
        for bucket in buckets
    ]
    count = sum(parameter.numel() for parameter in parameters.values())
    return GradientTimes(count, tuple(sorted(messages)))


def predicted_step(
    workload: GradientTimes,
    fabric: Fabric,
    alone: float,
    ranks: int,
    sigma: float = 0.0,
    negotiation: float = 0.0,
    cycle: float = 0.0,
) -> float:
    """Return the seconds of a step that takes `alone` on one GPU; ranks negotiate in seconds times log2."""
    backward = _BACKWARD_FRACTION * alone
    messages = [Message(alone - backward + ready * backward, size) for ready, size in workload.buckets]
    seconds = partial(all_reduce_seconds, ranks=ranks, fabric=fabric)
    end = fmean(
        end_of_exchange(messages, seconds, cycle, negotiation * math.log2(ranks), cycle * number / _PHASES)
        for number in range(_PHASES)
    )
    # Casts and copies run on the device between backward's kernels, on any number of ranks.
    copying = _COPIED_BYTES * workload.parameters / fabric.copy_rate
    return alone + max(0.0, end - alone) + copying + alone * sigma * expected_largest(ranks)


def expected_largest(ranks: int) -> float:
    """Return the mean of the largest of N standard normal draws: how late the slowest rank is, in sigmas.

    Blom's approximation.
    """
    return float(torch.special.ndtri(torch.tensor((ranks - 0.375) / (ranks + 0.25), dtype=torch.float64)))


def end_of_exchange(
    messages: Sequence[Message],
    seconds: Callable[[float], float],
    cycle: float,
    negotiation: float,
    phase: float = 0.0,
) -> float:
    """Return when all messages have arrived; `seconds` is the time of a message of a size.

    Once in a cycle Horovod's thread negotiates which messages are ready, and queues them for NCCL. Messages
    are in the order of their ready times. Cycles begin at `phase`.
    """
    period = max(cycle, negotiation)
    now, free, number = phase, 0.0, 0
    while number < len(messages):
        wait = messages[number].ready - now
        if wait > 0:  # until the first cycle that finds the message; rounding must not put it just before it
            cycles = math.ceil(wait / period) * period if period else 0.0
            now = max(now + cycles, messages[number].ready)
        free = max(now + negotiation, free)
        while number < len(messages) and messages[number].ready <= now:
            free += seconds(messages[number].size)
            number += 1
        now += period
    return free


def all_reduce_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    """Return the time of the faster of two algorithms, between which NCCL chooses for each size.

    A ring has 2(N-1) hops, of which 2(H-1) are between hosts; a tree goes up and down a chain in each host
    and a tree of hosts.
    """
    hosts, chain = fabric.hosts(ranks), min(ranks, fabric.ranks_per_host) - 1
    ring = (ranks - hosts) * fabric.ring_hop_inside + (hosts - 1) * fabric.ring_hop_between
    tree = chain * fabric.tree_hop_inside + math.ceil(math.log2(hosts)) * fabric.tree_hop_between
    return fabric.start + 2 * min(ring, tree) + fabric.bytes_seconds(size, ranks)
