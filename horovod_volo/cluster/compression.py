"""Compression of a bucket for its reduction: none, or fp16 with a scale per bucket. Given a bucket's
gradients, it scales them, rounds them to fp16, launches their sum over ranks, and writes the average back in
fp32.

fp16 covers 40 powers of two. Gradients spread over more than that, and the sum over many ranks needs
headroom. Each bucket is therefore multiplied by a power of two, its scale, before the cast, and divided by it
after the sum. The scale follows from a running maximum of the bucket's gradients. The ranks' maxima are
averaged in the same message as the batch-norm statistics, so that all ranks compute the same scale, and the
host does not wait for the device. The maxima of uncompressed buckets are in it too: all ranks skip the step
if one is not finite.

Invariants: a scale is a power of two, so that multiplying by it and dividing by it are exact. A maximum is
measured before anything is clamped: it is finite only if all gradients of the bucket are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Wait, WaitForResult

# (flat tensor, name of the collective) -> a function that waits for what this rank receives of the sum
ReduceAsync = Callable[[Tensor, str], WaitForResult]

_LARGEST_SUM = 2.0**15  # limit of the sum over ranks: half of fp16's maximum; the other half absorbs rounding
# A maximum may grow by 2^6 from one step to the next before values are clamped. The price: gradients below
# about ranks x 2^-33 of their bucket's maximum become 0; without this headroom, those below 2^-6 of that.
_HEADROOM_BITS = 6
DECAY = 0.99  # of the running maximum per step: it halves in 69 steps
_CACHED_ELEMENTS = 2**17  # elements of fp16 whose fp32 copy fits into a core's second-level cache
_MIN_EXPONENT, _MAX_EXPONENT = -100, 100  # a scale and its inverse are normal fp32 numbers


class NoCompression:
    """Sums gradients as they are; copying them into the bucket divides them by the number of ranks."""

    compresses_per_gradient = True  # whether each may be compressed as soon as backward has computed it

    def __init__(
        self, gradients: Tensor, output: Tensor, reduce_async: ReduceAsync, size: int, name: str
    ) -> None:
        """Reduce `gradients` over `size` ranks into `output`; `name` is the name of the collective."""
        self.gradients, self.output, self.reduce_async = gradients, output, reduce_async
        self.buffer = gradients  # the compressed gradients, in the bucket's layout
        self.size, self.name = size, name
        self.maximum: Tensor | None = None  # max |gradient| is written here, if anybody looks at it

    def compress_gradient(self, target: Tensor, gradient: Tensor) -> None:
        """Compress a gradient into `target`, its view of `buffer`; this may overwrite the gradient."""
        torch.mul(gradient, 1.0 / self.size, out=target)

    def compress_bucket(self) -> None:
        """Compress the bucket's gradients into `buffer`."""
        if self.size > 1:
            self.gradients.mul_(1.0 / self.size)

    def launch(self) -> Wait:
        """Launch the reduction of `buffer`; the returned function waits, then writes averaged gradients."""
        if self.maximum is not None:
            torch.mul(max_abs(self.gradients), self.size, out=self.maximum)
        wait_for_result = self.reduce_async(self.gradients, self.name)

        def finish() -> None:
            result = wait_for_result()
            if result is not self.output:
                self.output.copy_(result)

        return finish


class Fp16Compression(NoCompression):
    """Multiplies gradients by the bucket's scale and rounds them to fp16.

    The first step has no maximum yet (nor has a checkpoint without maxima): it sums in fp32.
    """

    def __init__(self, *bucket: Any, scales: "BucketScales", number: int) -> None:
        """Compress with the scale of bucket `number`; for the other arguments see `NoCompression`."""
        super().__init__(*bucket)
        self.buffer = torch.zeros_like(self.gradients, dtype=torch.float16)
        self._scales = scales
        self._scale, self._inverse_scale = scales.scale[number], scales.inverse_scale[number]
        self.maximum = scales.maxima[number : number + 1] if scales.adaptive else None
        self._maxima = [torch.zeros_like(scales.maxima[:1])]  # and those of what was compressed in this step
        self._limit = _LARGEST_SUM / (1 << (self.size - 1).bit_length())  # the next power of two of the ranks

    @property
    def compresses_per_gradient(self) -> bool:  # type: ignore[override]  # it changes after the first step
        return self._scales.initialized

    def compress_gradient(self, target: Tensor, gradient: Tensor) -> None:
        if self._scales.adaptive:
            self._maxima.append(max_abs(gradient))
        scale_into(target, gradient, self._scale)

    def compress_bucket(self) -> None:
        if self._scales.initialized:
            self.compress_gradient(self.buffer, self.gradients)
        else:
            super().compress_bucket()

    def launch(self) -> Wait:
        if not self._scales.initialized:
            return super().launch()
        if self.maximum is not None:
            self._clamp(self.maximum)
        wait_for_result = self.reduce_async(self.buffer, f"{self.name}.fp16")

        def finish() -> None:
            scale_into(self.output, wait_for_result(), self._inverse_scale)

        return finish

    def _clamp(self, own_maximum: Tensor) -> None:
        """Clamp the buffer so that its sum over ranks is finite, and store this rank's maximum."""
        maximum = torch.cat(self._maxima).amax(0, keepdim=True)
        del self._maxima[1:]
        limit = self._limit / self._scale
        # On a GPU, comparing with the limit would make the host wait: clamp always.
        if not on_cpu(self.buffer) or not maximum <= limit:
            self.buffer.clamp_(-self._limit, self._limit)
        # That of clamped values; nan if one of them was infinite.
        torch.add(maximum.minimum(limit), maximum, alpha=0.0, out=own_maximum)


class BucketScales:
    """The factor by which each bucket's gradients are multiplied before they are rounded to fp16."""

    def __init__(self, maxima: Tensor, size: int, *, adaptive: bool) -> None:
        """Start with the initial value, which scales that are not adaptive keep.

        `maxima` are max |gradient| of each bucket; after the statistics all-reduce, the mean over ranks.
        """
        self.adaptive = adaptive
        self.initialized = not adaptive
        self.maxima = maxima
        self.running_maxima = torch.zeros_like(maxima)  # decaying maximum of that mean
        # Gradients are divided by a power of two near sqrt(size) before the sum, and by the rest of the ranks
        # after it, so that fp16 neither overflows nor underflows.
        self.scale = maxima.new_full((len(maxima), 1), 2.0 ** -math.ceil(math.log2(size) / 2))
        self.inverse_scale = 1.0 / (self.scale * size)  # also divides by the number of ranks
        self._size = size
        self._initial_scale = self.scale.clone()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; call `update_after_restore` once they are overwritten."""
        return {"running_maxima": self.running_maxima} if self.adaptive else {}

    def update_after_restore(self) -> None:
        """Compute the scales from restored maxima; if all are 0, the checkpoint had none."""
        if bool((self.running_maxima > 0).any()):
            self._compute()

    def update(self, found_inf: Tensor | None = None) -> None:
        """Update running maxima and scales from this step's maxima, unless `found_inf` is not 0."""
        if found_inf is not None and not self.initialized and bool(found_inf):  # waits, in the first step
            return
        if self.adaptive:
            maxima = torch.fmax(self.running_maxima * DECAY, self.maxima)
            if found_inf is not None:
                maxima = torch.where(found_inf > 0, self.running_maxima, maxima)
            self.running_maxima.copy_(maxima)
            self._compute()

    def _compute(self) -> None:
        # The mean of the ranks' maxima times the number of ranks bounds every rank's values and their sum.
        _, exponents = torch.frexp(self.running_maxima * self._size)  # bound < 2^exponent
        wanted = int(math.log2(_LARGEST_SUM)) - _HEADROOM_BITS - exponents
        powers = power_of_two(wanted.clamp(_MIN_EXPONENT, _MAX_EXPONENT)).unsqueeze(1)
        known = (self.running_maxima > 0).unsqueeze(1)
        self.scale.copy_(torch.where(known, powers, self._initial_scale))
        self.inverse_scale.copy_(1.0 / (self.scale * self._size))
        self.initialized = True


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host, where other ways are the fastest."""
    return tensor.is_cpu


def max_abs(tensor: Tensor) -> Tensor:
    """Return the maximum absolute value of a tensor, (1,) in fp32; nan if any element is nan."""
    low, high = torch.aminmax(tensor)  # one pass, without a copy
    return torch.maximum(-low, high).float().view(1)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents exactly, by writing the exponent bits of fp32."""
    return (exponents.int() + 127).bitwise_left_shift(23).view(torch.float32)


def scale_into(target: Tensor, source: Tensor, factor: Tensor) -> None:
    """Write source * factor (1,) into a target of another dtype, rounded once; may overwrite the source."""
    if source.is_cuda:
        torch.mul(source, factor, out=target)
    elif target.dtype.itemsize > source.dtype.itemsize:
        # On a CPU, torch.mul with an output of another dtype would allocate a third tensor.
        for start in range(0, len(source), _CACHED_ELEMENTS):
            part = slice(start, start + _CACHED_ELEMENTS)
            target[part].copy_(source[part]).mul_(factor)
    else:
        target.copy_(source.mul_(factor))
