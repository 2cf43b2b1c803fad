"""Sharded optimizer (ZeRO stage 1): each rank updates one shard of the weights and stores only its state.

Gradients are reduce-scattered, so that a rank receives the average of its shard only. Its optimizer updates
the slices of parameters in the shard, and an allgather of the shards gives every rank all updated weights. A
slice may start or end within a parameter, so this works only for element-wise optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.compression import ReduceAsync
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World

STEP_KEY = "step"  # the only key of an optimizer's state with one number per parameter


class ShardedReducer(Reducer):
    """A reducer that gives each rank's optimizer one shard of every bucket."""

    def _shards_per_bucket(self) -> int:
        return self._world.size

    def _local_parameters(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        self._shards = [OptimizerShard(bucket, self._world) for bucket in self.buckets]
        slices = {name: part for shard in self._shards for name, part in shard.parameter_slices.items()}
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
            if self._loss_is_scaled:  # otherwise no step is skipped
                self._spread_overflow()
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
        self._world.collectives.allreduce_async(overflow, "overflow", 1.0)()
        for shard in self._shards:
            shard.gradients[0] += overflow

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given the local norm. Collective: every rank calls this."""
        squared = norm.square()
        self._world.collectives.allreduce_async(squared, "norm", 1.0)()
        return squared.sqrt()

    def replicated_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: no two ranks have the same optimizer state."""
        return {}

    def gather_optimizer_state(self, state: dict[str, Tensor], keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the full optimizer state by PARAMETER/KEY on rank 0. Collective: every rank calls this.

        Rank 0 has it in host memory, because the full state may not fit into a device; others get nothing.
        """
        full_state: dict[str, Tensor] = {}
        for bucket, name, key in self._state_entries(keys):
            gathered = self._gather_entry(state.get(f"{name}/{key}"), bucket, name, key)
            if self._world.is_rank_zero:
                full_state[f"{name}/{key}"] = gathered.cpu()
        return full_state

    def _gather_entry(self, local: Tensor | None, bucket: Bucket, name: str, key: str) -> Tensor:
        part = bucket.weights.new_empty(0) if local is None else local.to(bucket.weights).reshape(-1)
        full = self._world.collectives.allgather_async(part, f"state.{key}")()
        if key == STEP_KEY:
            return full[0]
        parameter = bucket.parameters[name]
        return full.as_strided(parameter.size(), parameter.stride())

    def scatter_optimizer_state(
        self, state: dict[str, Tensor], keys: Iterable[str], saved: Mapping[str, Tensor], root: int = 0
    ) -> None:
        """Load the local part of the state `saved` of rank `root`. Collective: every rank calls this."""
        if not self._world.allgather_object(bool(saved))[root]:
            return  # a new optimizer's state is the same everywhere
        for bucket, name, key in self._state_entries(keys):
            if key == STEP_KEY:
                full = torch.zeros((), device="cpu")
            else:
                full = torch.zeros_like(bucket.parameters[name])
            if f"{name}/{key}" in saved:
                full.detach().copy_(saved[f"{name}/{key}"])
            self._world.collectives.broadcast_async(full, f"state.{key}", root)()
            if f"{name}/{key}" in state:
                shard = self._shards[self.buckets.index(bucket)]
                local = full if key == STEP_KEY else shard.slice_of(full.detach(), name)
                state[f"{name}/{key}"].copy_(local)

    def _state_entries(self, keys: Iterable[str]) -> list[tuple[Bucket, str, str]]:
        """Return bucket, parameter name and key of each state tensor, in the same order on every rank."""
        keys = list(keys)
        return [(bucket, name, key) for bucket in self.buckets for name in bucket.parameters for key in keys]


class OptimizerShard:
    """This rank's shard of a bucket: weights that are views of the bucket, and separate gradients."""

    def __init__(self, bucket: Bucket, world: World) -> None:
        length = len(bucket.weights) // world.size
        self._bucket = bucket
        self._start, self._end = world.rank * length, (world.rank + 1) * length
        self.weights = bucket.weights[self._start : self._end]
        self.gradients = torch.zeros_like(self.weights)
        self.parameter_slices: dict[str, Parameter] = {}
        for name in bucket.parameters:
            start, end = self._span(name)
            if start < end:
                part = Parameter(bucket.weights[start:end])
                part.grad = self.gradients[start - self._start : end - self._start]
                self.parameter_slices[name] = part

    def _span(self, name: str) -> tuple[int, int]:
        """Return start and end of this rank's slice of a parameter, as offsets in the bucket."""
        offset = self._bucket.offsets[name]
        end = offset + self._bucket.parameters[name].numel()
        return max(offset, self._start), min(end, self._end)

    def slice_of(self, full: Tensor, name: str) -> Tensor:
        """Return this rank's slice of a tensor with the memory layout of a parameter."""
        offset = self._bucket.offsets[name]
        start, end = self._span(name)
        return full.as_strided((full.numel(),), (1,))[start - offset : end - offset]
