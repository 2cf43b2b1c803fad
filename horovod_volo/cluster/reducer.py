"""Gradients averaged over ranks while backward runs, and batch-norm statistics with them.

Each parameter's gradient is a view of a flat bucket. The last gradient to land in a bucket
sends it to the ring. Autograd must add into the views, never replace them: nobody may set
`parameter.grad`, and `averaged()` zeroes the buckets itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from horovod_volo.cluster.ring import Wait
from horovod_volo.cluster.world import World


class Reducer:
    """Lays out gradients in buckets and averages them over ranks and passes' sums."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        world: World,
        *,
        bucket_bytes: int,
        compression: Literal["none", "fp16"],
        passes: int,
        statistics: Iterable[Tensor] = (),
    ) -> None:
        # The last parameter used is the first to have its gradient: buckets fill in reverse order.
        trained = [parameter for parameter in parameters if parameter.requires_grad][::-1]
        wire = _Half if compression == "fp16" and world.size > 1 else _Plain
        groups = _split(trained, bucket_bytes)
        self.buckets = [_Bucket(group, passes, wire(world, f"bucket.{i}")) for i, group in enumerate(groups)]
        self._statistics = _joined(list(statistics))
        self._send_statistics = _Plain(world, "statistics").send

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, gradients are the average over ranks; after it, zero. Collective: every rank calls this.

        Running statistics are averaged too: every rank evaluates, and saves, the same network.
        """
        statistics_arrived = self._send_statistics(self._statistics)
        for bucket in self.buckets:
            bucket.send()  # whatever has not left by itself: parameters that took no part in the loss
        for bucket in self.buckets:
            bucket.receive()
        statistics_arrived()
        yield
        for bucket in self.buckets:
            bucket.clear()


class _Bucket:
    """Some parameters' gradients in one flat tensor, and how far their exchange is."""

    def __init__(self, parameters: list[Parameter], passes: int, wire: _Wire) -> None:
        self.flat = torch.zeros(
            sum(map(Tensor.numel, parameters)), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._gradients_due = passes * len(parameters)
        self._missing = self._gradients_due
        self._wire = wire
        self._wait: Wait | None = None
        offset = 0
        for parameter in parameters:
            # The parameter's own strides: channels-last weights keep channels-last gradients.
            parameter.grad = self.flat.as_strided(parameter.size(), parameter.stride(), offset)
            parameter.register_post_accumulate_grad_hook(self._landed)  # type: ignore[no-untyped-call]
            offset += parameter.numel()

    def _landed(self, _: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.send()
        elif self._missing < 0:
            raise RuntimeError(
                "more backward passes than the reducer was built for: call averaged() after them"
            )

    def send(self) -> None:
        if self._wait is None:
            self._wait = self._wire.send(self.flat)

    def receive(self) -> None:
        if self._wait is not None:
            self._wait()

    def clear(self) -> None:
        self.flat.zero_()
        self._missing = self._gradients_due
        self._wait = None


def _joined(tensors: list[Tensor]) -> Tensor:
    """Move tensors into one flat tensor, of which they become views."""
    if not tensors:
        return torch.zeros(1)
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat


def _split(parameters: list[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Cut the list where a bucket is full; one parameter may be larger than a bucket."""
    groups: list[list[Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room -= size
    return groups


class _Wire(Protocol):
    """The form in which a bucket travels."""

    def __init__(self, world: World, name: str) -> None: ...

    def send(self, flat: Tensor) -> Wait: ...


class _Plain:
    """As it is."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def send(self, flat: Tensor) -> Wait:
        return self._world.ring.start_sum(flat, self._name, 1.0 / self._world.size)


class _Half:
    """In fp16, half of the division by the ranks done before the sum: neither end of fp16's range is near."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._divisor = 2.0 ** math.ceil(math.log2(world.size) / 2)  # a power of two: exact
        self._half = torch.empty(0, dtype=torch.float16)

    def send(self, flat: Tensor) -> Wait:
        if self._half.numel() == 0:
            self._half = torch.empty_like(flat, dtype=torch.float16)
        torch.mul(flat, 1.0 / self._divisor, out=self._half)
        wait = self._world.ring.start_sum(self._half, self._name, 1.0)

        def receive() -> None:
            wait()
            flat.copy_(self._half).mul_(self._divisor / self._world.size)

        return receive
