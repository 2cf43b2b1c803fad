"""The ways for gradients to meet that are measured: each trains a copy of one network, step by step.

All run the same forward, backward and update. Whatever else a way costs or saves is its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from horovod_volo.bench.pairs import Action
from horovod_volo.cluster.collectives import Collectives, Wait
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import training_forward

# Plain gradient descent: an adaptive optimizer would blow a gradient's rounding up to a whole step.
LEARNING_RATE = 1e-3

Compression = Literal["none", "fp16"]
WIRES: dict[Compression, str] = {"none": "fp32", "fp16": "fp16"}
_COMPRESSIONS: tuple[Compression, ...] = ("none", "fp16")


@dataclass
class Work:
    """A network and a batch of this rank's own."""

    network: nn.Module
    images: Tensor
    classes: Tensor

    def copied(self) -> Lesson:
        """Copy the network, as it is now, together with the loss of the batch."""
        return Lesson(copy.deepcopy(self.network))

    def loss(self, lesson: Callable[..., Tensor]) -> Tensor:
        """Run a forward pass."""
        return lesson(self.images, self.classes)


class Lesson(nn.Module):
    """A network whose forward pass ends in a loss that every parameter takes part in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        class_logits, token_logits = training_forward(self.network)(images, lambda tokens: tokens, 0)
        token_classes = classes.repeat_interleave(token_logits.shape[1])
        token_loss = F.cross_entropy(token_logits.flatten(0, 1), token_classes)
        return F.cross_entropy(class_logits, classes) + 0.5 * token_loss


@dataclass
class Way:
    """One way, in one of its forms."""

    form: str
    compression: Compression
    lesson: Lesson
    step: Action
    exchange: Action = lambda: None  # without forward and backward, where it can run by itself
    messages: Callable[[], int] = lambda: 0  # sent so far


def no_exchange(work: Work) -> Way:
    """Let every rank train for itself, in torch's own plain way."""
    lesson = work.copied()
    optimizer = _optimizer(lesson)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(lesson).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Way("none", "none", lesson, step)


def ours(work: Work, world: World) -> Way:
    """Take our reducer as the trainer has it where nothing else is asked for."""
    return _reduced(work, world, Exchange().compression, passes=1)


def after_backward(work: Work, world: World) -> Way:
    """Send the same buckets when backward is over."""
    # Told of a second pass that never comes, no bucket leaves by itself.
    return _reduced(work, world, "none", passes=2)


def _reduced(work: Work, world: World, compression: Compression, passes: int) -> Way:
    lesson = work.copied()
    optimizer = _optimizer(lesson)
    ring = _Counted(world.collectives, f"{compression}.{passes}")
    here = replace(world, collectives=cast(Collectives, ring))
    reducer = Reducer(lesson, here, Exchange(compression=compression), passes=passes)

    def step() -> None:
        work.loss(lesson).backward()  # type: ignore[no-untyped-call]
        with reducer.synchronized_gradients():
            optimizer.step()

    def exchange() -> None:
        with reducer.synchronized_gradients():
            pass

    return Way(WIRES[compression], compression, lesson, step, exchange, lambda: ring.sums)


class _Counted:
    """A ring for sums alone, that counts them and has its own names: Horovod keeps what it knows by name."""

    def __init__(self, ring: Any, prefix: str) -> None:
        self._ring, self._prefix = ring, prefix
        self.sums = 0

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:
        self.sums += 1
        wait: Wait = self._ring.allreduce_async(tensor, f"{self._prefix}.{name}", scale)
        return wait


def stock_horovod(work: Work) -> list[Way]:
    """List forms of Horovod's DistributedOptimizer."""
    return [_stock(work, compression, groups) for compression in _COMPRESSIONS for groups in (0, 4)]


def _stock(work: Work, compression: Compression, groups: int) -> Way:
    from horovod_volo.bench.peers_reduce import distributed_optimizer

    lesson = work.copied()
    optimizer = distributed_optimizer(_optimizer(lesson), lesson, compression, groups)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(lesson).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Way(f"{WIRES[compression]}, {groups or 'no'} groups", compression, lesson, step)


def torch_ddp(work: Work) -> list[Way]:
    """List forms of torch's DistributedDataParallel."""
    return [_ddp(work, compression) for compression in _COMPRESSIONS]


def _ddp(work: Work, compression: Compression) -> Way:
    from horovod_volo.bench.peers_reduce import data_parallel

    lesson = work.copied()
    parallel = data_parallel(lesson, compression)
    optimizer = _optimizer(lesson)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(parallel).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Way(WIRES[compression], compression, lesson, step)


def _optimizer(lesson: Lesson) -> SGD:
    return SGD(lesson.parameters(), lr=LEARNING_RATE)


def weights(lesson: nn.Module) -> Tensor:
    """Return all weights in one tensor."""
    return nn.utils.parameters_to_vector(lesson.parameters()).detach().clone()
