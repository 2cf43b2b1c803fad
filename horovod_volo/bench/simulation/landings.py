"""At what share of backward each gradient is there: measured on one rank of the real network, here.

The share hardly depends on the machine, for it is work before over all work; the bytes do not at all.
"""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from horovod_volo.bench.simulation.prediction import Workload
from horovod_volo.bench.simulation.timeline import Message
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model, training_forward

_CLASSES = 1000
_BYTES = 2  # fp16 on the wire


def measured_workload(model: str, img_size: int, passes: int) -> Workload:
    """Run backward so many times, after one that warms up; each gradient's share is the median."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = build_model(model, img_size=img_size, num_classes=_CLASSES, drop_path=0.0).train()
        reducer = Reducer(network, World.single(), Exchange(), passes=1)
        shares = _shares(network, img_size, passes, reducer)
    finally:
        torch.set_num_threads(threads)
    parameters = dict(network.named_parameters())
    tensors = sorted(
        (Message(share, _BYTES * parameters[name].numel()) for name, share in shares.items()),
        key=lambda message: message.ready,
    )
    buckets = [
        Message(max(shares[name] for name in bucket.parameters), _BYTES * bucket.gradients.numel())
        for bucket in reducer.buckets
    ]
    return Workload(
        name=model,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        tensors=tuple(tensors),
        buckets=tuple(sorted(buckets, key=lambda message: message.ready)),
    )


def _shares(network: nn.Module, img_size: int, passes: int, reducer: Reducer) -> dict[str, float]:
    """Return by name at what share of backward a gradient has landed."""
    landed: dict[str, float] = {}
    for name, parameter in network.named_parameters():

        def note(_: Parameter, name: str = name) -> None:
            landed[name] = perf_counter()

        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    images = torch.randn(1, 3, img_size, img_size)
    found: dict[str, list[float]] = {}
    for number in range(passes + 1):
        class_logits, token_logits = training_forward(network)(images, _as_they_are, 0)
        began = perf_counter()
        (class_logits.sum() + token_logits.sum()).backward()  # type: ignore[no-untyped-call]
        ended = perf_counter()
        with reducer.synchronized_gradients():
            pass
        for name, moment in landed.items() if number else ():
            found.setdefault(name, []).append((moment - began) / (ended - began))
    return {name: statistics.median(values) for name, values in found.items()}


def _as_they_are(tokens: Tensor) -> Tensor:
    return tokens
