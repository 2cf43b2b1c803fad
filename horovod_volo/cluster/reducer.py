"""Gradients averaged over ranks while backward runs, and batch-norm statistics with them.

A gradient is put into its bucket, in the form in which that travels, as soon as autograd has made it; the
last one to land sends the bucket to the ring. Between steps no parameter has a gradient, so that autograd
makes the next without adding it to anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket, build_buckets
from horovod_volo.cluster.collectives import Arrive, Wait
from horovod_volo.cluster.compression import (
    BucketScales,
    Compression,
    ExchangeSum,
    Fp16Compression,
    NoCompression,
    summed_in_fp32,
)
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange

_MIB = 2**20


def lay_out(
    parameters: Mapping[str, Parameter], settings: Exchange, *, ranks: int, parts: int
) -> list[Bucket]:
    """Lay parameters out in buckets as so many ranks exchange them."""
    compressed = settings.compression == "fp16" and ranks > 1
    return build_buckets(
        parameters,
        round(settings.bucket_mib * _MIB),
        parts,
        round(settings.last_bucket_mib * _MIB),
        summed_in_fp32(parameters) if compressed else (),
    )


class Reducer:
    """Lays out gradients in buckets and averages them over ranks and passes' sums."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        settings: Exchange,
        *,
        passes: int,
        loss_is_scaled: bool = False,
    ) -> None:
        parameters = dict(model.named_parameters())
        self.buckets = lay_out(parameters, settings, ranks=world.size, parts=self._parts(world))
        self.local_parameters = self._own(parameters, world)  # what this rank's optimizer updates, by name
        self.flat_gradients = self._flat_gradients()  # of what is owned, with zeros between
        self._world = world
        compressed = settings.compression == "fp16" and world.size > 1
        self.factors = BucketScales(
            sum(bucket.compressible for bucket in self.buckets) if compressed else 0,
            world.size,
            like=self.buckets[0].gradients,
            # Gradients of a scaled loss fit fp16, and their overflow must stay visible to the scaler.
            adaptive=compressed and not loss_is_scaled,
        )
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        # One message for all that is averaged besides gradients.
        self._statistics = _joined([*buffers, self.factors.maxima])
        self._reductions = [
            _BucketReduction(bucket, passes, self._compression(bucket, number, compressed))
            for number, bucket in enumerate(self.buckets)
        ]

    def _parts(self, world: World) -> int:  # noqa: ARG002
        return 1

    def _own(self, parameters: Mapping[str, Parameter], world: World) -> dict[str, Parameter]:  # noqa: ARG002
        return dict(parameters)

    def _flat_gradients(self) -> list[Tensor]:
        return [bucket.gradients for bucket in self.buckets]

    def _compression(self, bucket: Bucket, number: int, compressed: bool) -> Compression:
        target, exchange = self._route(bucket)
        plain = NoCompression(bucket.gradients, target, exchange, self._world.size, f"bucket.{number}")
        compressed = compressed and bucket.compressible
        return Fp16Compression(plain, self.factors, number) if compressed else plain

    def _route(self, bucket: Bucket) -> tuple[Tensor, ExchangeSum]:
        """Return where a bucket's averaged gradients go on this rank, and what sums them over ranks."""

        def exchange(tensor: Tensor, name: str) -> Arrive:
            wait = self._world.collectives.allreduce_async(tensor, name, 1.0)

            def arrive() -> Tensor:
                wait()
                return tensor

            return arrive

        return bucket.gradients, exchange

    @contextmanager
    def synchronized_gradients(self) -> Iterator[None]:
        """Inside, gradients are the average over ranks; after it, zero. Collective: every rank calls this.

        Running statistics are averaged too: every rank evaluates, and saves, the same network.
        """
        for reduction in self._reductions:
            reduction.send()  # what backward has not sent: parameters that took no part in the loss
        scale = 1.0 / self._world.size
        statistics_arrived = self._world.collectives.allreduce_async(self._statistics, "statistics", scale)
        for reduction in self._reductions:
            reduction.receive()
        statistics_arrived()
        self.factors.update()
        yield
        for reduction in self._reductions:
            reduction.clear()

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients from that of the owned ones. Collective: every rank calls this."""
        return norm

    def replicated_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return that part of the optimizer's state that is the same on all ranks."""
        return state

    def gather_optimizer_state(self, state: dict[str, Tensor], keys: Iterable[str]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the optimizer's state by PARAMETER/KEY, whole on rank 0. Collective: every rank calls."""
        return state

    def scatter_optimizer_state(
        self,
        state: dict[str, Tensor],
        keys: Iterable[str],  # noqa: ARG002
        saved: Mapping[str, Tensor],
    ) -> None:
        """Give every rank its part of a whole state that rank 0 has. Collective: every rank calls this."""
        for name, tensor in saved.items():
            state[name].copy_(tensor)
        self._world.broadcast_(state.values())


class _BucketReduction:
    """How far the reduction of a bucket's gradients is in this step."""

    def __init__(self, bucket: Bucket, passes: int, compression: Compression) -> None:
        self._compression = compression
        self._passes = passes
        self._wait: Wait | None = None
        self._due = self._missing = passes * len(bucket.parameters)
        self._direct = False  # whether gradients go into the compressed form as they come
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {
            parameter: (bucket.view(compression.form, name), bucket.view(bucket.gradients, name))
            for name, parameter in bucket.parameters.items()
        }
        self.clear()
        bucket.register_grad_ready_hook(self._grad_ready)

    def _grad_ready(self, parameter: Tensor) -> None:
        self._collect(parameter)
        self._missing -= 1
        if self._missing == 0:
            self.send()
        elif self._missing < 0:
            raise RuntimeError(
                "more backward passes than the reducer was built for: call synchronized_gradients() after "
                f"{self._passes} of them"
            )

    def send(self) -> None:
        if self._wait is not None:
            return
        if self._missing:
            for parameter in self._places:
                self._collect(parameter)
        if not self._direct:
            self._compression.pack()
        self._wait = self._compression.send()

    def _collect(self, parameter: Tensor) -> None:
        """Put a parameter's gradient into the bucket, unless it is there; zeros where it has none."""
        in_form, place = self._places[parameter]
        gradient = parameter.grad
        if gradient is None:
            (in_form if self._direct else place).zero_()
        elif gradient is not place:
            if self._direct:
                self._compression.put(in_form, gradient)
            else:
                place.copy_(gradient)
        parameter.grad = place

    def receive(self) -> None:
        if self._wait is not None:
            self._wait()

    def clear(self) -> None:
        for parameter in self._places:
            parameter.grad = None
        self._missing = self._due
        self._wait = None
        # Several passes are summed up in full precision first.
        self._direct = self._passes == 1 and self._compression.direct


def _joined(tensors: list[Tensor]) -> Tensor:
    """Move tensors into one flat tensor, of which they become views; it has one element at least."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    if not len(flat):
        return flat.new_zeros(1)
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat
