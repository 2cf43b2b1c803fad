"""Triton kernels for NVIDIA GPUs, as torch operators. Launching one imports Triton, in a `*_kernels` module.

The choice between a kernel and PyTorch's own operators holds for the whole process, which trains one model
(kernels/choice.py). Until it is made, PyTorch's operators are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from torch import Tensor

Kernel = Literal["outlook attention", "loss", "augmentation"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
_DEVICES = ("cuda", "meta")  # on meta, memory and time of a step on a GPU are estimated
_used: dict[Kernel, float] = {}


def use_kernels(speeds: Mapping[Kernel, float]) -> None:
    """Use these kernels, and no others, in all following calls; they are so many times as fast."""
    _used.clear()
    _used.update(speeds)


@contextmanager
def estimated_with_kernels(choice: Literal["auto", "plain"]) -> Iterator[None]:
    """Use all kernels inside, or none with "plain": for the meta device, on which nothing is computed."""
    before = dict(_used)
    use_kernels(dict.fromkeys(KERNELS if choice == "auto" else (), 1.0))
    try:
        yield
    finally:
        use_kernels(before)


def describe_kernels() -> str:
    """Return which kernels are used."""
    return ", ".join(f"{name} ({speed:.1f} x PyTorch)" for name, speed in _used.items()) or "PyTorch's own"


def runs_kernel(name: Kernel, tensor: Tensor) -> bool:
    """Return whether the operation is to use its kernel on a tensor."""
    return name in _used and tensor.device.type in _DEVICES
