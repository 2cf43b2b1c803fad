"""Gradients averaged over ranks while backward runs, and batch-norm statistics with them.

A gradient is put into its bucket, in the form in which that travels, as soon as autograd has made it; the
last one to land sends the bucket to the ring. Between steps no parameter has a gradient, so that autograd
makes the next without adding it to anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket, fill_buckets
from horovod_volo.cluster.ring import Wait
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange

Compression = Literal["none", "fp16"]
_MIB = 2**20


class Reducer:
    """Lays out gradients in buckets and averages them over ranks and passes' sums."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        settings: Exchange,
        *,
        passes: int,
    ) -> None:
        parameters = dict(model.named_parameters())
        self.buckets = fill_buckets(
            parameters,
            round(settings.bucket_mib * _MIB),
            self._parts(world),
            round(settings.last_bucket_mib * _MIB),
        )
        self.owned = self._own(parameters, world)  # what this rank's optimizer updates, by name
        self.flat_gradients = self._flat_gradients()  # of what is owned, with zeros between
        self._world = world
        self._departures = [
            _Departure(bucket, passes, self._wire(bucket, world, settings.compression, f"bucket.{number}"))
            for number, bucket in enumerate(self.buckets)
        ]
        self._statistics = _joined([buffer for buffer in model.buffers() if buffer.is_floating_point()])

    def _parts(self, world: World) -> int:  # noqa: ARG002
        return 1

    def _own(self, parameters: Mapping[str, Parameter], world: World) -> dict[str, Parameter]:  # noqa: ARG002
        return dict(parameters)

    def _flat_gradients(self) -> list[Tensor]:
        return [bucket.gradients for bucket in self.buckets]

    def _wire(self, bucket: Bucket, world: World, compression: Compression, name: str) -> Wire:
        form = Half if compression == "fp16" and world.size > 1 else Plain
        return form(bucket.gradients, world, name)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, gradients are the average over ranks; after it, zero. Collective: every rank calls this.

        Running statistics are averaged too: every rank evaluates, and saves, the same network.
        """
        scale = 1.0 / self._world.size
        statistics_arrived = self._world.ring.start_sum(self._statistics, "statistics", scale)
        for departure in self._departures:
            departure.send()  # whatever has not left by itself: parameters that took no part in the loss
        for departure in self._departures:
            departure.receive()
        statistics_arrived()
        yield
        for departure in self._departures:
            departure.clear()

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients from that of the owned ones. Collective: every rank calls this."""
        return norm

    def common(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return that part of the optimizer's state that is the same on all ranks."""
        return state

    def gather_state(self, state: dict[str, Tensor], keys: Iterable[str]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the optimizer's state by PARAMETER/KEY, whole on rank 0. Collective: every rank calls."""
        return state

    def scatter_state(
        self,
        state: dict[str, Tensor],
        keys: Iterable[str],  # noqa: ARG002
        saved: Mapping[str, Tensor],
    ) -> None:
        """Give every rank its part of a whole state that rank 0 has. Collective: every rank calls this."""
        for name, tensor in saved.items():
            state[name].copy_(tensor)
        self._world.broadcast_(state.values())


class _Departure:
    """How far a bucket's gradients are on their way."""

    def __init__(self, bucket: Bucket, passes: int, wire: Wire) -> None:
        self._wire = wire
        self._due = passes * len(bucket.parameters)
        self._missing = self._due
        self._wait: Wait | None = None
        # Several passes are summed up in full precision first.
        self._form, self._scale = (wire.form, wire.scale) if passes == 1 else (bucket.gradients, 1.0)
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for name, parameter in bucket.parameters.items():
            place = bucket.view(bucket.gradients, name)
            collected = place if self._form is bucket.gradients else bucket.view(self._form, name)
            self._places[parameter] = (collected, place)
            parameter.grad = None
        bucket.on_landed(self._landed)

    def _landed(self, parameter: Tensor) -> None:
        self._collect(parameter)
        self._missing -= 1
        if self._missing == 0:
            self.send()
        elif self._missing < 0:
            raise RuntimeError(
                "more backward passes than the reducer was built for: call averaged() after them"
            )

    def send(self) -> None:
        if self._wait is not None:
            return
        if self._missing:
            for parameter in self._places:
                self._collect(parameter)
        if self._form is not self._wire.form or self._scale != self._wire.scale:
            scale_into(self._wire.form, self._form, self._wire.scale)
        self._wait = self._wire.send()

    def _collect(self, parameter: Tensor) -> None:
        """Put a parameter's gradient into the bucket, unless it is there; zeros where it has none."""
        collected, place = self._places[parameter]
        if parameter.grad is None:
            collected.zero_()
        elif parameter.grad is not place:
            scale_into(collected, parameter.grad, self._scale)
        parameter.grad = place

    def receive(self) -> None:
        if self._wait is not None:
            self._wait()

    def clear(self) -> None:
        for parameter in self._places:
            parameter.grad = None
        self._missing = self._due
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


class Wire(Protocol):
    """How a bucket's gradients travel."""

    form: Tensor  # what travels, of the bucket's layout
    scale: float  # of the gradients in it

    def send(self) -> Wait:
        """Begin the exchange; the result waits until the average has arrived in the gradients."""


class Plain:
    """As they are, divided by the ranks before the sum: on the way into the bucket that costs nothing."""

    def __init__(self, gradients: Tensor, world: World, name: str) -> None:
        self.form, self._world, self._name = gradients, world, name
        self.scale = 1.0 / world.size

    def send(self) -> Wait:
        return self._world.ring.start_sum(self.form, self._name, 1.0)


class Half:
    """In fp16, half of the division by the ranks done before the sum: neither end of fp16's range is near."""

    def __init__(self, gradients: Tensor, world: World, name: str) -> None:
        self._gradients, self._world, self._name = gradients, world, name
        self.form = torch.zeros_like(gradients, dtype=torch.float16)
        self.scale = 1.0 / predivisor(world.size)

    def send(self) -> Wait:
        wait = self._world.ring.start_sum(self.form, self._name, 1.0)

        def receive() -> None:
            wait()
            scale_into(self._gradients, self.form, 1.0 / (self.scale * self._world.size))

        return receive


def scale_into(target: Tensor, source: Tensor, factor: float) -> None:
    """Write `factor` times `source`, multiplied in the wider of their types; this may spoil the source."""
    widens = target.dtype.itemsize > source.dtype.itemsize
    if factor == 1.0:
        target.copy_(source)
    elif source.dtype == target.dtype or (source.is_cuda and not widens):
        torch.mul(source, factor, out=target)
    elif source.is_cuda:
        # A plain number would leave the product in the source's type, whatever it is written to.
        torch.mul(source, torch.full((1,), factor, dtype=target.dtype, device=source.device), out=target)
    elif widens:  # on CPU torch would make a third tensor for a product of another type
        target.copy_(source).mul_(factor)
    else:
        target.copy_(source.mul_(factor))


def predivisor(ranks: int) -> float:
    """Return by what gradients are divided before they are summed in fp16: a power of two, so exactly."""
    return float(2.0 ** math.ceil(math.log2(ranks) / 2))
