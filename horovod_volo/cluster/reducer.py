"""Averages gradients over ranks while backward runs. The reducer copies gradients into their buckets, and
launches a bucket's all-reduce when autograd has computed its last gradient. It gives gradients that are
summed over micro-batches and averaged over ranks. On a CPU, a gradient is copied as soon as it is computed,
while it is in a cache; on a GPU, one kernel copies all gradients of a bucket.

Batch-norm statistics are averaged too. Between steps each `grad` is None, so that autograd need not add to an
earlier gradient.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket, build_gradient_buckets
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.compression import BucketScales, Fp16Compression, NoCompression, ReduceAsync, on_cpu
from horovod_volo.cluster.step_statistics import StepStatistics
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.names import Registry


class Reducer:
    """Sums gradients over micro-batches and averages them over ranks."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        settings: Exchange,
        *,
        micro_batches: int,
        heads: Collection[str] = (),
        loss_is_scaled: bool = False,
        of_all_ranks: int = 0,  # with --reproducible, backward passes of all ranks in a step
    ) -> None:
        """Move the trained parameters into buckets; each step has `micro_batches` backward passes."""
        parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._world, self._settings, self._loss_is_scaled = world, settings, loss_is_scaled
        self.buckets = build_gradient_buckets(
            parameters, settings, heads=heads, ranks=world.size, shards=self._shards_per_bucket()
        )
        # What this rank's optimizer updates, and the flat tensors that hold the gradients; padding is 0.
        self.local_parameters = self._local_parameters(parameters)
        self.local_gradients = self._local_gradients()
        self._build_exchange(model, micro_batches, of_all_ranks)

    def _build_exchange(self, model: nn.Module, micro_batches: int, of_all_ranks: int) -> None:  # noqa: ARG002
        world = self._world
        compressed = self._settings.compression == "fp16" and world.size > 1
        self.statistics = StepStatistics(
            moving_buffers(model), self.buckets[0].gradients.new_zeros(len(self.buckets)), world
        )
        compressible = sum(bucket.compressible for bucket in self.buckets) if compressed else 0
        self.scales = BucketScales(
            self.statistics.maxima[:compressible],
            world.size,
            # Gradients of a scaled loss fit fp16, and the gradient scaler must see their overflow.
            adaptive=compressed and not self._loss_is_scaled,
        )
        self._reductions = [
            BucketReduction(bucket, micro_batches, self._compression(bucket, number, number < compressible))
            for number, bucket in enumerate(self.buckets)
        ]

    def _shards_per_bucket(self) -> int:
        return 1

    def _local_parameters(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return dict(parameters)

    def _local_gradients(self) -> list[Tensor]:
        return [bucket.gradients for bucket in self.buckets]

    def _compression(self, bucket: Bucket, number: int, compressed: bool) -> NoCompression:
        arguments = (bucket.gradients, *self._reduction(bucket), self._world.size, f"bucket.{number}")
        if compressed:
            return Fp16Compression(*arguments, scales=self.scales, number=number)
        uncompressed = NoCompression(*arguments)
        if self.statistics.looks and not self._loss_is_scaled:
            uncompressed.maximum = self.statistics.maxima[number : number + 1]
        return uncompressed

    def _reduction(self, bucket: Bucket) -> tuple[Tensor, ReduceAsync]:
        """Return the tensor for a bucket's averaged gradients, and the collective that sums over ranks."""
        return bucket.gradients, self._world.collectives.allreduce_async

    @contextmanager
    def synchronized_gradients(self) -> Iterator[None]:
        """Inside, each `grad` is the average over ranks; afterwards None. Collective: every rank calls this.

        Batch-norm statistics are averaged too, so that all ranks evaluate and save the same network.
        """
        # Backward has not launched the buckets with a parameter that the loss does not depend on.
        for reduction in self._reductions:
            reduction.launch()
        wait = self.statistics.average_async()
        for reduction in self._reductions:
            reduction.finish()
        wait()
        if self._loss_is_scaled:  # otherwise the statistics say it
            self._spread_overflow()
        yield
        # Not before: if a rank is lost while updates are exchanged inside, the step is taken again.
        self.statistics.complete_step()
        self._update_scales()
        for reduction in self._reductions:
            reduction.reset()

    def _spread_overflow(self) -> None:
        """Let the gradients of all ranks show an overflow of any rank: averages of all of them do."""

    def _update_scales(self) -> None:
        if self.statistics.finite:
            self.scales.update(self.statistics.found_inf)

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given the local norm. Collective: every rank calls this."""
        return norm

    def replicated_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the optimizer state that is the same on all ranks."""
        return state

    def gather_optimizer_state(self, state: dict[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the full optimizer state by PARAMETER/KEY on rank 0. Collective: every rank calls this."""
        return state

    def scatter_optimizer_state(
        self,
        state: dict[str, Tensor],
        keys: Sequence[str],  # noqa: ARG002
        saved: Mapping[str, Tensor],
        root: int = 0,
    ) -> None:
        """Load the full optimizer state `saved` of rank `root`. Collective: every rank calls this."""
        for name, tensor in saved.items():
            state[name].copy_(tensor)
        self._world.broadcast_(state.values(), root)


class BucketReduction:
    """Launches the reduction of one bucket when its last gradient of a step is ready."""

    def __init__(self, bucket: Bucket, micro_batches: int, compression: NoCompression) -> None:
        self._compression = compression
        self._micro_batches = micro_batches
        self._wait: Wait | None = None
        self._gradients_per_step = self._missing = micro_batches * len(bucket.parameters)
        self._copies_at_once = not on_cpu(bucket.gradients)
        # For each parameter its views of the compression buffer and of the bucket's gradients.
        self._views: dict[Tensor, tuple[Tensor, Tensor]] = {
            parameter: (bucket.view(compression.buffer, name), bucket.view(bucket.gradients, name))
            for name, parameter in bucket.parameters.items()
        }
        self.reset()
        bucket.register_grad_ready_hook(self._on_grad_ready)

    def _on_grad_ready(self, parameter: Tensor) -> None:
        if not self._copies_at_once:
            self._collect([parameter])
        self._missing -= 1
        if self._missing == 0:
            self.launch()
        elif self._missing < 0:
            raise RuntimeError(
                "more backward passes than the reducer was built for: call synchronized_gradients() after "
                f"{self._micro_batches} of them"
            )

    def launch(self) -> None:
        if self._wait is None:
            self._collect(self._views)  # also those that backward has not computed
            if not self._compresses_each:
                self._compression.compress_bucket()
            self._wait = self._compression.launch()

    @property
    def _compresses_each(self) -> bool:
        """Whether each gradient is compressed; those of several micro-batches are summed in fp32 before."""
        one_by_one = self._micro_batches == 1 and not self._copies_at_once
        return one_by_one and self._compression.compresses_per_gradient

    def _collect(self, parameters: Iterable[Tensor]) -> None:
        """Copy gradients, or 0 where there is none, into the bucket; let each `grad` refer to it there.

        Those that lie in memory like the bucket's views are copied by one kernel.
        """
        compresses_each = self._compresses_each
        views, gradients = [], []
        for parameter in parameters:
            compressed, view = self._views[parameter]
            gradient, parameter.grad = parameter.grad, view
            if gradient is None:
                (compressed if compresses_each else view).zero_()
            elif gradient is view:
                continue
            elif compresses_each:
                self._compression.compress_gradient(compressed, gradient)
            elif gradient.stride() == view.stride():
                views.append(view)
                gradients.append(gradient)
            else:
                view.copy_(gradient)
        if views:
            torch._foreach_copy_(views, gradients)

    def finish(self) -> None:
        if self._wait is not None:
            self._wait()

    def reset(self) -> None:
        for parameter in self._views:
            parameter.grad = None
        self._missing = self._gradients_per_step
        self._wait = None


def moving_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that steps change; a layer in evaluation mode, frozen batch norm, keeps its own.

    Averages of equal numbers over ranks may differ from them by rounding.
    """
    return [
        buffer
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


# How gradients are exchanged, by name.
REDUCERS: Registry[type[Reducer]] = Registry("exchange of gradients", "--shard-optimizer")
REDUCERS.register("whole", Reducer)
