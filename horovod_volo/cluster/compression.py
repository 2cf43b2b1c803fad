"""The form in which a bucket's gradients are summed over ranks: as they are, or as fp16.

fp16 holds 40 powers of two, gradients spread over more than that, and the sum over many ranks needs room at
the upper end. So each bucket is multiplied by a power of two before the cast and divided by it after the sum.
The factor follows from the bucket's running maximum. Each rank's maximum travels in the message that averages
the batch-norm statistics, so all ranks compute the same factor, and the host never waits for the device.

Invariant: a factor is a power of two, so that multiplying by it and dividing by it round nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Arrive, Wait

ExchangeSum = Callable[[Tensor, str], Arrive]  # starts to sum a flat tensor; what arrives is this rank's part

_LARGEST_SUM = 2.0**15  # of fp16's 65504; what is left covers the rounding of a sum over many ranks
# A maximum may grow by 2^6 from one step to the next before anything is limited. 2^-6 of fp16's range is left
# unused for it, at the end where only values below 2^-26 of the largest would gain.
_HEADROOM_BITS = 6
_DECAY = 0.99  # of the running maximum in a step: it halves in 69
_HEADS = {"head", "aux_head"}  # layers that give logits, as all published code names them
_CACHED = 2**17  # elements of fp16, of which a copy in fp32 stays in a core's second cache
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -100, 100  # a factor and its inverse are normal fp32 numbers


def summed_in_fp32(parameters: Mapping[str, Tensor]) -> set[str]:
    """Name the parameters whose gradients fp16 would sum worse than bf16 arithmetic computes them.

    All ranks agree on much of the gradient of a bias, a norm or a head. A sum of nearly equal numbers rounds
    the same way at each addition, and the error grows with the ranks. They are a few per cent of a network.
    """
    return {
        name
        for name, parameter in parameters.items()
        if parameter.dim() <= 1 or not _HEADS.isdisjoint(name.split("."))
    }


class Compression(Protocol):
    """How a bucket's gradients are exchanged."""

    form: Tensor  # what is summed over ranks, in the bucket's layout

    @property
    def direct(self) -> bool:
        """Say whether a gradient may be written into `form` as soon as backward has made it."""

    def put(self, target: Tensor, gradient: Tensor) -> None:
        """Write a gradient into its place in `form`; this may overwrite the gradient."""

    def pack(self) -> None:
        """Write the bucket's gradients, collected in full precision, into `form`."""

    def send(self) -> Wait:
        """Start the exchange; the result waits until this rank's gradients hold their average."""


class NoCompression:
    """Gradients as they are, divided by the ranks before the sum: on the way into the bucket that is free."""

    direct = True

    def __init__(
        self, gradients: Tensor, target: Tensor, exchange: ExchangeSum, size: int, name: str
    ) -> None:
        self.form, self.target, self.exchange, self.size, self.name = gradients, target, exchange, size, name
        self._factor = 1.0 / size

    def put(self, target: Tensor, gradient: Tensor) -> None:
        torch.mul(gradient, self._factor, out=target)

    def pack(self) -> None:
        if self.size > 1:
            self.form.mul_(self._factor)

    def send(self) -> Wait:
        arrive = self.exchange(self.form, self.name)

        def receive() -> None:
            arrived = arrive()
            if arrived is not self.target:
                self.target.copy_(arrived)

        return receive


class Fp16Compression:
    """Gradients rounded to fp16 after they are multiplied by the bucket's factor.

    Until a maximum is known, which is in a run's first step alone, they are exchanged as they are.
    """

    def __init__(self, plain: NoCompression, factors: BucketScales, number: int) -> None:
        """Compress what `plain` would exchange, by the factor of this number."""
        self.form = torch.zeros_like(plain.form, dtype=torch.float16)
        self._plain, self._factors = plain, factors
        self._factor, self._inverse = factors.forward[number], factors.backward[number]  # (1,) each
        self._maximum = factors.maxima[number : number + 1]
        self._limit = _LARGEST_SUM / _next_power_of_two(plain.size)

    @property
    def direct(self) -> bool:
        return self._factors.known

    def put(self, target: Tensor, gradient: Tensor) -> None:
        scale_into(target, gradient, self._factor)

    def pack(self) -> None:
        if self._factors.known:
            scale_into(self.form, self._plain.form, self._factor)

    def send(self) -> Wait:
        if not self._factors.known:
            self._maximum.copy_(largest(self._plain.form))
            self._plain.pack()
            return self._plain.send()
        if self._factors.adaptive:
            self._limit_and_measure()
        arrive = self._plain.exchange(self.form, f"{self._plain.name}.fp16")

        def receive() -> None:
            scale_into(self._plain.target, arrive(), self._inverse)

        return receive

    def _limit_and_measure(self) -> None:
        """Keep the sum over ranks finite whatever this rank's gradients are, and note their maximum."""
        maximum = largest(self.form)
        # Of a GPU it is not asked whether anything is above the limit: the host would wait for the answer.
        if not _on_host(self.form) or not maximum <= self._limit:
            self.form.clamp_(-self._limit, self._limit)
            maximum = maximum.clamp(max=self._limit)
        torch.div(maximum, self._factor, out=self._maximum)


class BucketScales:
    """What each bucket's gradients are multiplied by before they are rounded to fp16."""

    def __init__(self, buckets: int, size: int, *, like: Tensor, adaptive: bool) -> None:
        """Begin without history. Where they are not to adapt, the factors stay what they are at first."""
        self.adaptive = adaptive
        self.known = not adaptive
        self.maxima = like.new_zeros(buckets)  # of this rank's gradients; after the exchange their mean
        self.running = like.new_zeros(buckets)  # largest recent mean over ranks of their maxima
        self.forward = like.new_full((buckets, 1), 1.0 / predivisor(size))
        self.backward = 1.0 / (self.forward * size)
        self._size = size
        self._fixed = self.forward.clone()

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors to store and restore; `restored` is called after the latter."""
        return {"running_maxima": self.running} if self.adaptive else {}

    def restored(self) -> None:
        """Compute the factors from restored maxima; zeros are no history."""
        if bool((self.running > 0).any()):
            self._compute()

    def update(self) -> None:
        """Take in the maxima of a step, averaged over ranks."""
        if self.adaptive:
            torch.fmax(self.running * _DECAY, self.maxima, out=self.running)  # nan counts as nothing
            self._compute()

    def _compute(self) -> None:
        # The mean of the maxima times the ranks bounds every rank's values and their sum.
        _, exponents = torch.frexp(self.running * self._size)  # bound < 2^exponent
        wanted = int(math.log2(_LARGEST_SUM)) - _HEADROOM_BITS - exponents
        powers = _power_of_two(wanted.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)).unsqueeze(1)
        some = (self.running > 0).unsqueeze(1)
        self.forward.copy_(torch.where(some, powers, self._fixed))
        self.backward.copy_(1.0 / (self.forward * self._size))
        self.known = True


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor, (1,) in fp32; of not a number, that."""
    if _on_host(tensor) and tensor.dtype == torch.float16:
        return _largest_by_bits(tensor)
    low, high = torch.aminmax(tensor)  # one pass, without a copy
    return torch.maximum(-low, high).float().view(1)


def _largest_by_bits(tensor: Tensor) -> Tensor:
    """Return the same of fp16 at four times the speed: a processor compares its bits, not its values.

    As whole numbers the bits grow with the absolute value, then infinity, then nan. The sign comes first:
    with it as a sign the largest is the largest positive one, without it the largest negative one.
    """
    signed = tensor.view(torch.int16).numpy()
    unsigned = signed.view(np.uint16)
    most = 0
    for begin in range(0, len(signed), _CACHED):
        piece = slice(begin, begin + _CACHED)
        most = max(most, int(signed[piece].max()), int(unsigned[piece].max()) & 0x7FFF)
    return torch.tensor([most], dtype=torch.int16).view(torch.float16).float()


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to these whole numbers, exactly: the bits of a float are written."""
    return (exponents.int() + 127).bitwise_left_shift(23).view(torch.float32)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def predivisor(ranks: int) -> float:
    """Return about the root of the ranks as a power of two.

    Dividing by it before the sum and by the rest after it keeps fp16 from both of its ends.
    """
    return float(2.0 ** math.ceil(math.log2(ranks) / 2))


def scale_into(target: Tensor, source: Tensor, factor: Tensor) -> None:
    """Write `source` times a tensor (1,) into one of another type, rounded once; may overwrite the source."""
    if source.is_cuda:
        torch.mul(source, factor, out=target)
    elif target.dtype.itemsize > source.dtype.itemsize:
        # On a CPU torch would make a third tensor for a product of another type.
        for begin in range(0, len(source), _CACHED):
            piece = slice(begin, begin + _CACHED)
            target[piece].copy_(source[piece]).mul_(factor)
    else:
        target.copy_(source.mul_(factor))
