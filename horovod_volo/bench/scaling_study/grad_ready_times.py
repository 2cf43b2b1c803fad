"""The fraction of backward after which each gradient is ready, measured on one rank of the real network.

The fraction is work done over all work, so it depends little on the machine; the bytes do not depend on it.
"""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from torch import nn
from torch.nn import Parameter

from horovod_volo.bench.scaling_study.prediction import GradientTimes, Message
from horovod_volo.cluster.reducer import Reducer, build_gradient_buckets, wire_bytes
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model, spec_of, training_forward

_CLASSES = 1000
_BYTES = 2  # per parameter: sent in fp16
_REPEATS = 3


def measured_gradient_times(model: str, img_size: int, repeats: int = _REPEATS) -> GradientTimes:
    """Run backward several times after a warm-up; each gradient's fraction is the median."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = build_model(model, img_size=img_size, num_classes=_CLASSES, drop_path=0.0).train()
        reducer = Reducer(network, World.single(), Exchange(), micro_batches=1)
        fractions = _ready_fractions(network, img_size, repeats, reducer)
    finally:
        torch.set_num_threads(threads)
    parameters = dict(network.named_parameters())
    tensors = [Message(ready, _BYTES * parameters[name].numel()) for name, ready in fractions.items()]
    several = build_gradient_buckets(parameters, Exchange(), heads=spec_of(model).heads, ranks=2, shards=1)
    buckets = [
        Message(max(fractions[name] for name in bucket.parameters), wire_bytes(bucket, Exchange()))
        for bucket in several
    ]
    count = sum(parameter.numel() for parameter in parameters.values())
    by_time = [tuple(sorted(messages, key=lambda message: message.ready)) for messages in (tensors, buckets)]
    return GradientTimes(model, count, *by_time)


def _ready_fractions(network: nn.Module, img_size: int, repeats: int, reducer: Reducer) -> dict[str, float]:
    ready: dict[str, float] = {}
    for name, parameter in network.named_parameters():

        def note(_: Parameter, name: str = name) -> None:
            ready[name] = perf_counter()

        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    images = torch.randn(1, 3, img_size, img_size)
    found: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        class_logits, token_logits = training_forward(network)(images, lambda tokens: tokens, 0)
        began = perf_counter()
        (class_logits.sum() + token_logits.sum()).backward()  # type: ignore[no-untyped-call]
        ended = perf_counter()
        with reducer.synchronized_gradients():
            pass
        for name, moment in ready.items() if number else ():
            found.setdefault(name, []).append((moment - began) / (ended - began))
    return {name: statistics.median(values) for name, values in found.items()}
