"""Sums that do not depend on their order, for --reproducible: of gradients, batch-norm statistics and norms.

The sum of floating-point numbers depends on their order, and so on how many ranks share the micro-batches of
a step. The sum of integers does not. Each gradient of each micro-batch is multiplied by a power of two, the
scale of its parameter, rounded to an integer, and added to those of the micro-batches before. Horovod adds
the integers of all ranks as int32. The scale follows from a running maximum, which all ranks know. Maxima
are counted in units of 1 / scale. fp64 adds integers of up to 53 bits exactly, so one message in fp64 has
these units, the batch-norm statistics and the notes of a step.

Invariant: if the units of a parameter add up to less than 2^31, no sum of its integers has overflowed, on any
rank. If they do not, all ranks see so in the same message: they skip the step, and in the next one the
scale has more range.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.compression import DECAY, BucketScales, NoCompression, max_abs, power_of_two
from horovod_volo.cluster.reducer import REDUCERS, BucketReduction, Reducer, moving_buffers
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.step_statistics import StepStatistics

_RANGE = 2.0**31  # of int32
# The scale lets running maxima add up to less than 2^22 units: they may grow 2^9-fold from step to step.
_TARGET_BITS = 22
_FIRST_BITS = 29  # of the first step's scale: the mean over micro-batches of their maxima may be 4
_LOSS_SCALE_BITS = 16  # of the initial loss scale, by which gradients of a scaled loss are larger
_MOST = 2.0**40  # units of a maximum, and whole parts of a statistic: fp64 adds 2^13 of them exactly
_FRACTION_BITS = 40  # of a batch-norm statistic: 1e-12, while 1e-5 is added to variances
_SQUARE_BITS = 38  # of the square of a gradient over the largest one of its parameter


class FixedPointScales(BucketScales):
    """The powers of two by which the gradients of each parameter are multiplied before they are rounded."""

    def __init__(self, like: Tensor, micro_batches: int, *, loss_is_scaled: bool) -> None:
        """Start with the scales of the first step. `like` has an element for each parameter.

        `micro_batches` are those of a step on all ranks.
        """
        bits = _FIRST_BITS - math.ceil(math.log2(micro_batches)) - _LOSS_SCALE_BITS * loss_is_scaled
        self.micro_batches, self.loss_is_scaled = micro_batches, loss_is_scaled
        self.scale = torch.full_like(like, 2.0**bits)
        self._first_scale = self.scale.clone()
        self.running_maxima = torch.zeros_like(like)  # of the sum over micro-batches of max |gradient|
        self.maxima = torch.zeros_like(like)  # max |gradient| in the micro-batch under way
        self.units = torch.zeros_like(like, dtype=torch.float64)  # the sum so far; at the end, of all ranks
        self.overflow = like.new_zeros(1)  # nan if a sum of a scaled loss's gradients is not right

    def state_tensors(self) -> dict[str, Tensor]:
        return {"running_maxima_of_parameters": self.running_maxima}

    def update_after_restore(self) -> None:
        self._compute()

    def add_micro_batch(self) -> None:
        """Add the maxima of a micro-batch, rounded up; one that is not finite makes the sum nan."""
        units = (self.maxima.double() * self.scale).ceil_()
        self.units += torch.where(units.isfinite(), units.clamp_(max=_MOST), torch.nan)
        self.maxima.zero_()

    def update(self, found_inf: Tensor | None = None) -> None:  # noqa: ARG002
        """Update running maxima and scales, also after a step that was skipped because a sum overflowed."""
        sums = (self.units / self.scale).clamp_(max=2.0**100).to(self.maxima.dtype)
        # Nothing decays in steps in which it has no gradient, or one that is not finite.
        grown = torch.maximum(self.running_maxima * DECAY, sums)
        self.running_maxima.copy_(torch.where(sums > 0, grown, self.running_maxima))
        self.units.zero_()
        self._compute()

    def _compute(self) -> None:
        _, exponents = torch.frexp(self.running_maxima)  # a maximum is below 2^exponent
        scale = power_of_two((_TARGET_BITS - exponents).clamp(-100, 100))
        self.scale.copy_(torch.where(self.running_maxima > 0, scale, self._first_scale))


class FixedPointSum(NoCompression):
    """Sums the gradients of a bucket over micro-batches and ranks as int32."""

    def __init__(self, *bucket: Any, scales: FixedPointScales, spans: Mapping[int, slice]) -> None:
        """`spans` are the parts of `output` that belong to parameters, by the numbers of these."""
        super().__init__(*bucket)
        self.buffer = torch.zeros_like(self.gradients, dtype=torch.int32)
        self._scales, self._spans = scales, spans

    def add(self, target: Tensor, gradient: Tensor, number: int) -> None:
        """Add a gradient to `target`, its parameter's view of `buffer`; this overwrites the gradient."""
        self._scales.maxima[number : number + 1] = max_abs(gradient)
        target += gradient.mul_(self._scales.scale[number]).round_().to(torch.int32)

    def compress_bucket(self) -> None:
        """Do nothing: all gradients have been added."""

    def launch(self) -> Wait:
        wait_for_sum = self.reduce_async(self.buffer, f"{self.name}.int32")

        def finish() -> None:
            self.output.copy_(wait_for_sum())
            inverse_scale = 1.0 / (self._scales.scale * self._scales.micro_batches)
            for number, span in self._spans.items():
                self.output[span] *= inverse_scale[number]
            self.buffer.zero_()

        return finish


class FixedPointReduction(BucketReduction):
    """Adds each gradient of each micro-batch as soon as backward has computed it."""

    def __init__(
        self, bucket: Bucket, micro_batches: int, sums: FixedPointSum, numbers: Mapping[str, int]
    ) -> None:
        super().__init__(bucket, micro_batches, sums)
        self._sums = sums
        self._numbers: dict[Tensor, int] = {
            parameter: numbers[name] for name, parameter in bucket.parameters.items()
        }
        self._copies_at_once = False

    def _collect(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._sums.add(self._views[parameter][0], gradient, self._numbers[parameter])

    def finish(self) -> None:
        super().finish()
        for parameter, (_, view) in self._views.items():
            parameter.grad = view


class OrderlessStatistics(StepStatistics):
    """Averages small tensors over micro-batches, each of which moves the statistics of the step before."""

    def __init__(
        self, moving: list[Tensor], counters: list[Tensor], scales: FixedPointScales, *others: Any
    ) -> None:
        """`counters` of batch norms count steps; `others` are further arguments of StepStatistics."""
        super().__init__(moving, *others)
        self._scales, self._counters = scales, counters
        self._moving = self._averaged[: sum(buffer.numel() for buffer in moving)]
        self._sums = torch.zeros((2, len(self._moving)), dtype=torch.float64, device=self._moving.device)
        self.looks = True
        self.update_after_restore()

    def update_after_restore(self) -> None:
        super().update_after_restore()
        self._counted = [counter.clone() for counter in self._counters]

    def add_micro_batch(self, loss: Tensor) -> None:
        super().add_micro_batch(loss)
        moved = self._moving.double()
        whole = torch.where(moved.abs() < _MOST, moved, torch.nan).round_()
        self._sums += torch.stack([whole, ((moved - whole) * 2.0**_FRACTION_BITS).round_()])
        self._scales.add_micro_batch()
        self._go_back()

    def average_async(self) -> Wait:
        # What this rank has that is not finite is looked for here.
        units = self._scales.units.sum().view(1)
        fault = torch.zeros_like(units) if self._scales.loss_is_scaled else units
        self._averaged.copy_(torch.cat([self._sums.sum(0), fault, self._notes]))
        return super().average_async()

    def _start_exchange(self) -> Callable[[], object]:
        message = torch.cat([self._sums.view(-1), self._scales.units, self._notes.double()])
        wait = self._world.collectives.allreduce_async(message, "statistics")

        def finish() -> None:
            count, units = len(self._moving), self._scales.units
            whole, fraction, sums, notes = torch.split(wait(), [count, count, len(units), len(self._notes)])
            units.copy_(sums)
            # Like a gradient that is not finite, an overflow makes all ranks skip the step, or their scaler.
            overflow = torch.where((units < _RANGE).all(), 0.0, torch.nan).view(1)
            self._scales.overflow.copy_(overflow)
            overflow = torch.zeros_like(overflow) if self._scales.loss_is_scaled else overflow
            averages = (whole + fraction * 2.0**-_FRACTION_BITS) / self._scales.micro_batches
            self._averaged.copy_(torch.cat([averages, overflow, notes / self._world.size]))
            self._sums.zero_()

        return finish

    def complete_step(self) -> None:
        if self.finite:
            for counter in self._counters:
                counter += 1
        super().complete_step()
        self._counted = [counter.clone() for counter in self._counters]

    def restore(self) -> None:
        super().restore()
        self._go_back()

    def _go_back(self) -> None:
        """Set the batch-norm statistics to what they were after the last step."""
        self._moving.copy_(self._before[: len(self._moving)])
        for counter, counted in zip(self._counters, self._counted, strict=True):
            counter.copy_(counted)

    def _fault(self, own: Tensor) -> str:
        fault = super()._fault(own)
        if fault or self._world.rank:
            return fault
        return "gradients have outgrown their range, which is larger from now on,"


class ReproducibleReducer(Reducer):
    """A reducer whose averages are the same, bit for bit, on any number of ranks."""

    statistics: OrderlessStatistics
    scales: FixedPointScales

    def _build_exchange(self, model: nn.Module, micro_batches: int, of_all_ranks: int) -> None:
        names = [name for bucket in self.buckets for name in bucket.parameters]
        self._numbers = {name: number for number, name in enumerate(sorted(names))}
        like = self.buckets[0].gradients
        self.scales = FixedPointScales(
            like.new_zeros(len(names)), of_all_ranks, loss_is_scaled=self._loss_is_scaled
        )
        moving, counters, overflow = moving_buffers(model), batch_counters(model), like.new_zeros(1)
        self.statistics = OrderlessStatistics(moving, counters, self.scales, overflow, self._world)
        self._reductions = []
        for position, bucket in enumerate(self.buckets):
            spans = {self._numbers[name]: span for name, span in self._spans(position).items()}
            arguments = (bucket.gradients, *self._reduction(bucket), self._world.size, f"bucket.{position}")
            sums = FixedPointSum(*arguments, scales=self.scales, spans=spans)
            self._reductions.append(FixedPointReduction(bucket, micro_batches, sums, self._numbers))

    def _spans(self, position: int) -> Mapping[str, slice]:
        """Return the parts of a bucket's local gradients that belong to parameters."""
        bucket = self.buckets[position]
        return {
            name: slice(bucket.offsets[name], bucket.offsets[name] + parameter.numel())
            for name, parameter in bucket.parameters.items()
        }

    def _update_scales(self) -> None:
        self.scales.update()

    def _spread_overflow(self) -> None:
        for gradients in self.local_gradients:
            gradients[:1] += self.scales.overflow

    def global_grad_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, whose squares are added as integers. Collective."""
        parts = [
            (self._numbers[name], gradients[span])
            for position, gradients in enumerate(self.local_gradients)
            for name, span in self._spans(position).items()
        ]
        largest = torch.zeros_like(self.scales.maxima)
        for number, part in parts:
            largest[number : number + 1] = max_abs(part)
        largest = self._by_rank(largest, "norm.maxima").amax(0).double()
        sums = torch.zeros_like(largest, dtype=torch.int64)
        for number, part in parts:
            fractions = (part / largest[number].clamp(min=1e-30)).square_()
            sums[number] = (fractions * 2.0**_SQUARE_BITS).round_().to(torch.int64).sum()
        squares = largest.square() * self._by_rank(sums, "norm").sum(0) * 2.0**-_SQUARE_BITS
        return squares.sum().sqrt().to(norm.dtype)

    def _by_rank(self, values: Tensor, name: str) -> Tensor:  # noqa: ARG002
        """Return what ranks have computed of different gradients (ranks, length): here all have all."""
        return values.view(1, -1)


class ReproducibleShardedReducer(ReproducibleReducer, ShardedReducer):
    """A reproducible reducer that gives each rank's optimizer one shard of every bucket."""

    def _spans(self, position: int) -> Mapping[str, slice]:
        return self._shards[position].spans

    def _by_rank(self, values: Tensor, name: str) -> Tensor:
        return self._world.gather(values, name)


def batch_counters(model: nn.Module) -> list[Tensor]:
    """Return the counters of batches of the batch norms that are trained."""
    counters = (getattr(module, "num_batches_tracked", None) for module in model.modules() if module.training)
    return [counter for counter in counters if counter is not None]


REDUCERS.register("whole reproducible", ReproducibleReducer)
REDUCERS.register("sharded reproducible", ReproducibleShardedReducer)
