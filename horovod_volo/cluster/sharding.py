"""Sharded optimizer (ZeRO stage 1): each rank updates one shard of the weights and stores only its state.

Gradients are reduce-scattered, so that a rank receives the average of its shard only. Its optimizer updates
the slices of parameters in the shard, and an allgather of the shards gives every rank all updated weights. A
slice may start or end within a parameter, so this works only for element-wise optimizers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.compression import ReduceAsync
from horovod_volo.cluster.reducer import REDUCERS, Reducer
from horovod_volo.cluster.world import World

STEP_KEY = "step"  # the only key of an optimizer's state with one number per parameter


class ShardedReducer(Reducer):
    """A reducer that gives each rank's optimizer one shard of every bucket."""

    def _shards_per_bucket(self) -> int:
        return self._world.size

    def _local_parameters(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        self._shards = [OptimizerShard(bucket, self._world) for bucket in self.buckets]
        if not any(shard.spans for shard in self._shards):  # an optimizer needs a parameter
            # The last shard is padding, which stays 0: it counts as a slice of its last parameter.
            padding = self._shards[-1]
            padding.spans[padding.parameters[-1]] = slice(None)
        slices = {name: part for shard in self._shards for name, part in shard.parameter_slices().items()}
        return {name: slices[name] for name in parameters if name in slices}

    def _local_gradients(self) -> list[Tensor]:
        return [shard.gradients for shard in self._shards]

    def _reduction(self, bucket: Bucket) -> tuple[Tensor, ReduceAsync]:
        shard = self._shards[self.buckets.index(bucket)]
        return shard.gradients, self._world.collectives.reduce_scatter_async

    @contextmanager
    def synchronized_gradients(self) -> Iterator[None]:
        """Inside, local gradients are averaged over ranks; afterwards all weights are updated. Collective."""
        with super().synchronized_gradients():
            yield
            waits = [
                self._world.collectives.allgather_async(shard.weights, f"weights.{number}")
                for number, shard in enumerate(self._shards)
            ]
            for bucket, wait_for_weights in zip(self.buckets, waits, strict=True):
                bucket.weights.copy_(wait_for_weights())

    def _spread_overflow(self) -> None:
        """Write an overflow of any rank into the gradients of all, which then all skip the same step."""
        flags = [shard.gradients.abs().amax() * 0 for shard in self._shards]  # 0, or nan
        overflow = torch.stack(flags).sum()
        self._world.sum(overflow, "overflow")
        for shard in self._shards:
            shard.gradients[0] += overflow

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given the local norm. Collective: every rank calls this."""
        return self._world.sum(norm.square(), "norm").sqrt()

    def replicated_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: no two ranks have the same optimizer state."""
        return {}

    def gather_optimizer_state(self, state: dict[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the full optimizer state by PARAMETER/KEY on rank 0. Collective: every rank calls this.

        Rank 0 has it in host memory, because the full state may not fit into a device; others get nothing.
        """
        full_state: dict[str, Tensor] = {}
        for number, (bucket, shard) in enumerate(zip(self.buckets, self._shards, strict=True)):
            message, parts = _pack(shard, keys, state)
            gathered = self._world.collectives.allgather_async(message, f"state.{number}")()
            if self._world.is_rank_zero:
                lengths = [len(part) for part in parts.values()]
                rows = torch.split(gathered.cpu().view(self._world.size, -1), lengths, 1)
                for key, by_rank in zip(keys, rows, strict=True):
                    # Ranks with a slice of a parameter have counted the same steps of it; others send 0.
                    full = by_rank.amax(0) if key == STEP_KEY else by_rank.reshape(-1)
                    full_state |= _views(bucket, key, full)
        return full_state

    def scatter_optimizer_state(
        self, state: dict[str, Tensor], keys: Sequence[str], saved: Mapping[str, Tensor], root: int = 0
    ) -> None:
        """Load the local part of the state `saved` of rank `root`. Collective: every rank calls this."""
        if not self._world.allgather_object(bool(saved))[root]:
            return  # a new optimizer's state is the same everywhere
        for number, (bucket, shard) in enumerate(zip(self.buckets, self._shards, strict=True)):
            message, parts = _pack(bucket, keys, saved)
            self._world.collectives.broadcast_async(message, f"state.{number}", root)()
            for key, part in parts.items():
                local = part if key == STEP_KEY else part[shard.start : shard.end]
                _copy(_views(shard, key, local), state)


class OptimizerShard:
    """This rank's shard of a bucket: weights that are views of the bucket, and separate gradients."""

    def __init__(self, bucket: Bucket, world: World) -> None:
        length = len(bucket.weights) // world.size
        self.start, self.end = world.rank * length, (world.rank + 1) * length
        self.weights = bucket.weights[self.start : self.end]
        self.gradients = torch.zeros_like(self.weights)
        self.parameters = list(bucket.parameters)  # the names of those of the bucket
        self.spans: dict[str, slice] = {}  # the slices of parameters in the shard
        for name, parameter in bucket.parameters.items():
            offset = bucket.offsets[name] - self.start
            start, end = max(offset, 0), min(offset + parameter.numel(), length)
            if start < end:
                self.spans[name] = slice(start, end)

    def parameter_slices(self) -> dict[str, Parameter]:
        """Return this rank's slices of parameters, with their gradients."""
        slices = {name: Parameter(self.weights[span]) for name, span in self.spans.items()}
        for name, part in slices.items():
            part.grad = self.view(self.gradients, name)
        return slices

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return this rank's slice of a parameter, which may be empty, in a flat tensor like the shard."""
        return flat[self.spans.get(name, slice(0))]


def _pack(
    part: Bucket | OptimizerShard, keys: Sequence[str], state: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a flat tensor with the state of a bucket or shard, and its views: a number per parameter for the
    key `step`, for the others a tensor like the weights.
    """
    lengths = [len(part.parameters if key == STEP_KEY else part.weights) for key in keys]
    message = part.weights.new_zeros(sum(lengths))
    parts = dict(zip(keys, torch.split(message, lengths), strict=True))
    for key, flat in parts.items():
        _copy(state, _views(part, key, flat))
    return message, parts


def _views(part: Bucket | OptimizerShard, key: str, flat: Tensor) -> dict[str, Tensor]:
    """Return the view for each parameter, by PARAMETER/KEY, of a tensor that holds the state of a key."""
    return {
        f"{name}/{key}": flat[number] if key == STEP_KEY else part.view(flat, name)
        for number, name in enumerate(part.parameters)
    }


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy the tensors that both have."""
    for name in source.keys() & target.keys():
        target[name].copy_(source[name])


REDUCERS.register("sharded", ShardedReducer)
