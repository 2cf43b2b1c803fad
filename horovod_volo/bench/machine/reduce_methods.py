"""Methods of exchanging gradients that are measured: each trains a copy of one network.

All run the same forward, backward and update; whatever else a method costs or saves is its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from horovod_volo.bench.comparison import Action
from horovod_volo.cluster.collectives import Collectives, Wait
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import spec_of, training_forward

Compression = Literal["none", "fp16"]
DTYPES: dict[Compression, str] = {"none": "fp32", "fp16": "fp16"}


class ModelWithLoss(nn.Module):
    """A network whose forward returns a loss that every parameter contributes to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the loss of a batch: class token and, weighted by half, all tokens."""
        class_logits, token_logits = training_forward(self.network)(images, lambda tokens: tokens, 0)
        token_classes = classes.repeat_interleave(token_logits.shape[1])
        token_loss = F.cross_entropy(token_logits.flatten(0, 1), token_classes)
        return F.cross_entropy(class_logits, classes) + 0.5 * token_loss


def network_heads(model: str) -> list[str]:
    """Return the names of the heads of a model in a `ModelWithLoss`."""
    return [f"network.{head}" for head in spec_of(model).heads]


@dataclass
class Work:
    """A network, and this rank's own batch."""

    world: World
    network: nn.Module
    heads: list[str]  # modules of `model()` that compute logits
    images: Tensor
    classes: Tensor

    def model(self) -> ModelWithLoss:
        """Return a copy of the network in its initial state, with the loss."""
        return ModelWithLoss(copy.deepcopy(self.network))

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        """Run forward."""
        return model(self.images, self.classes)


@dataclass
class Method:
    """One method of exchange in one of its forms."""

    form: str
    compression: Compression
    model: ModelWithLoss
    step: Action
    exchange: Action = lambda: None  # the exchange without forward and backward, where it can run alone
    messages: Callable[[], int] = lambda: 0  # sent so far


def sgd(model: nn.Module) -> SGD:
    """Return plain gradient descent: an adaptive optimizer would enlarge rounding errors to whole steps."""
    return SGD(model.parameters(), lr=1e-3)


def plain_method(
    work: Work, model: ModelWithLoss, forward: nn.Module, optimizer: Any, form: str, compression: Compression
) -> Method:
    """Build a method that lies in `forward` or `optimizer`, around torch's plain step."""

    def step() -> None:
        optimizer.zero_grad()
        work.loss(forward).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Method(form, compression, model, step)


def no_exchange(work: Work) -> Method:
    """Build a plain step without exchange: every rank trains by itself."""
    model = work.model()
    return plain_method(work, model, model, sgd(model), "none", "none")


def ours(work: Work) -> Method:
    """Build a step with our reducer and the trainer's default settings."""
    return _reduced(work, Exchange().compression, passes=1)


def after_backward(work: Work) -> Method:
    """Build a step with our reducer that sends the buckets uncompressed, when backward has ended."""
    # The reducer waits for a second micro-batch, which never comes, so no bucket is sent during backward.
    return _reduced(work, "none", passes=2)


def _reduced(work: Work, compression: Compression, passes: int) -> Method:
    model = work.model()
    optimizer = sgd(model)
    ring = _CountingRing(work.world.collectives, f"{compression}.{passes}")
    world = replace(work.world, collectives=cast(Collectives, ring))
    reducer = Reducer(model, world, Exchange(compression=compression), micro_batches=passes, heads=work.heads)

    def step() -> None:
        work.loss(model).backward()  # type: ignore[no-untyped-call]
        with reducer.synchronized_gradients():
            optimizer.step()

    def exchange() -> None:
        with reducer.synchronized_gradients():
            pass

    return Method(DTYPES[compression], compression, model, step, exchange, lambda: ring.sums)


class _CountingRing:
    """Counts all-reduces and gives them names of their own, as Horovod caches responses by name."""

    def __init__(self, ring: Any, prefix: str) -> None:
        self._ring, self._prefix = ring, prefix
        self.sums = 0

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:
        self.sums += 1
        wait: Wait = self._ring.allreduce_async(tensor, f"{self._prefix}.{name}", scale)
        return wait
