"""Each rank updates its share of the weights, and alone keeps the optimizer's state of it (ZeRO, stage 1).

Gradients are summed by reduce-scatter: a rank receives the average of its share of each bucket only. Its
optimizer sees the pieces of parameters that lie there, updates them, and the ranks join their shares again.
A piece may begin and end amidst a parameter: only updates that treat each element alone can be shared out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.compression import ExchangeSum
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange

SCALAR = "step"  # the one key of an optimizer's state that has a single value for each parameter


class ShardedReducer(Reducer):
    """A reducer of which every rank keeps one share."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        settings: Exchange,
        *,
        passes: int,
        loss_is_scaled: bool = False,
    ) -> None:
        super().__init__(model, world, settings, passes=passes, loss_is_scaled=loss_is_scaled)
        # Without a loss scale no step is skipped, and nothing is to be agreed on.
        self._agree = self._spread_overflow if loss_is_scaled else lambda: None

    def _parts(self, world: World) -> int:
        return world.size

    def _own(self, parameters: Mapping[str, Parameter], world: World) -> dict[str, Parameter]:
        self._shards = [OptimizerShard(bucket, world) for bucket in self.buckets]
        pieces = {name: piece for shard in self._shards for name, piece in shard.pieces.items()}
        return {name: pieces[name] for name in parameters if name in pieces}

    def _flat_gradients(self) -> list[Tensor]:
        return [shard.gradients for shard in self._shards]

    def _route(self, bucket: Bucket) -> tuple[Tensor, ExchangeSum]:
        return self._shards[
            self.buckets.index(bucket)
        ].gradients, self._world.collectives.reduce_scatter_async

    @contextmanager
    def synchronized_gradients(self) -> Iterator[None]:
        """Inside, owned gradients are the average over ranks; after it, weights are whole. Collective."""
        with super().synchronized_gradients():
            self._agree()
            yield
            ring = self._world.collectives
            joins = [
                ring.allgather_async(shard.weights, f"weights.{n}") for n, shard in enumerate(self._shards)
            ]
            for bucket, join in zip(self.buckets, joins, strict=True):
                bucket.weights.copy_(join())

    def _spread_overflow(self) -> None:
        """Make one rank's overflow every rank's: all must skip the same step."""
        flags = [shard.gradients.abs().amax() * 0 for shard in self._shards]  # 0, or nan
        overflow = torch.stack(flags).sum()
        self._world.collectives.allreduce_async(overflow, "overflow", 1.0)()
        for shard in self._shards:
            shard.gradients[0] += overflow

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients from that of the owned ones. Collective: every rank calls this."""
        squared = norm.square()
        self._world.collectives.allreduce_async(squared, "norm", 1.0)()
        return squared.sqrt()

    def replicated_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: no two ranks have the same state."""
        return {}

    def gather_optimizer_state(self, state: dict[str, Tensor], keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the optimizer's state by PARAMETER/KEY, whole on rank 0. Collective: every rank calls.

        It is whole on no other rank, and on no device: it may be shared out for want of room.
        """
        whole: dict[str, Tensor] = {}
        for bucket, name, key in self._entries(keys):
            gathered = self._gathered(state.get(f"{name}/{key}"), bucket, name, key)
            if self._world.is_rank_zero:
                whole[f"{name}/{key}"] = gathered.cpu()
        return whole

    def _gathered(self, piece: Tensor | None, bucket: Bucket, name: str, key: str) -> Tensor:
        part = bucket.weights.new_empty(0) if piece is None else piece.to(bucket.weights).reshape(-1)
        whole = self._world.collectives.allgather_async(part, f"state.{key}")()
        if key == SCALAR:
            return whole[0]
        parameter = bucket.parameters[name]
        return whole.as_strided(parameter.size(), parameter.stride())

    def scatter_optimizer_state(
        self, state: dict[str, Tensor], keys: Iterable[str], saved: Mapping[str, Tensor]
    ) -> None:
        """Give every rank its part of a whole state that rank 0 has. Collective: every rank calls this."""
        if not self._world.broadcast_object(bool(saved)):
            return  # a fresh state is the same everywhere
        for bucket, name, key in self._entries(keys):
            whole = (
                torch.zeros((), device="cpu") if key == SCALAR else torch.zeros_like(bucket.parameters[name])
            )
            if f"{name}/{key}" in saved:
                whole.detach().copy_(saved[f"{name}/{key}"])
            self._world.collectives.broadcast(whole, f"state.{key}")
            if f"{name}/{key}" in state:
                shard = self._shards[self.buckets.index(bucket)]
                state[f"{name}/{key}"].copy_(whole if key == SCALAR else shard.cut(whole.detach(), name))

    def _entries(self, keys: Iterable[str]) -> list[tuple[Bucket, str, str]]:
        """List what the whole state consists of, in the same order on every rank."""
        wanted = list(keys)
        return [
            (bucket, name, key) for bucket in self.buckets for name in bucket.parameters for key in wanted
        ]


class OptimizerShard:
    """This rank's part of a bucket: weights that are views of it, and gradients of its own."""

    def __init__(self, bucket: Bucket, world: World) -> None:
        length = len(bucket.weights) // world.size
        self._bucket = bucket
        self._begin, self._end = world.rank * length, (world.rank + 1) * length
        self.weights = bucket.weights[self._begin : self._end]
        self.gradients = torch.zeros_like(self.weights)
        self.pieces: dict[str, Parameter] = {}
        for name in bucket.parameters:
            begin, end = self._span(name)
            if begin < end:
                piece = Parameter(bucket.weights[begin:end])
                piece.grad = self.gradients[begin - self._begin : end - self._begin]
                self.pieces[name] = piece

    def _span(self, name: str) -> tuple[int, int]:
        """Return where this rank's piece of a parameter begins and ends in the bucket."""
        offset = self._bucket.offsets[name]
        end = offset + self._bucket.parameters[name].numel()
        return max(offset, self._begin), min(end, self._end)

    def cut(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's piece of a tensor that is laid out like a parameter."""
        offset = self._bucket.offsets[name]
        begin, end = self._span(name)
        return whole.as_strided((whole.numel(),), (1,))[begin - offset : end - offset]
