"""Operators that hand-written kernels may compute instead of PyTorch's own.

The extra `kernels` registers them and chooses (kernels/choice.py). The choice holds for the whole process,
which trains one model; until it is made, and without the extra, PyTorch's operators are used.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from horovod_volo.core.names import Registry

Operator = Literal["outlook attention", "loss", "augmentation"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
# What --kernels takes: a function that chooses the kernels of a run and returns warnings.
CHOICES: Registry[Callable[..., list[str]]] = Registry("choice of kernels", "--kernels")
# Those that compute on a CPU whenever the extra is there: they need no choice.
CPU_OPERATORS: Registry[Callable[..., Any]] = Registry("operator of CPUs", "--device cpu")
_DEVICES = ("cuda", "meta")  # on meta, memory and time of a step on a GPU are estimated
_kernels: dict[Operator, Any] = {}
_used: set[Operator] = set()


def register_kernel(name: Operator, kernel: Any) -> None:
    """Make a kernel known: what the operator's caller expects, a function or several."""
    _kernels[name] = kernel


def choose_kernels(choice: str, device: torch.device, *run: Any) -> list[str]:
    """Choose the kernels of a run, given what --kernels says; return warnings. Collective on a GPU."""
    use_kernels(())
    if device.type != "cuda" or not CHOICES.has_extra(choice):
        return []
    return CHOICES.find(choice)(device, *run)


def use_kernels(names: Iterable[Operator]) -> None:
    """Use these kernels, and no others, in all following calls."""
    chosen = set(names)
    if chosen:
        CHOICES.find("auto")  # imports them
    _used.clear()
    _used.update(chosen)


@contextmanager
def estimated_with_kernels(choice: str) -> Iterator[None]:
    """Use all kernels inside, or none with "plain": for the meta device, on which nothing is computed."""
    before = set(_used)
    use_kernels(OPERATORS if CHOICES.has_extra(choice) else ())
    try:
        yield
    finally:
        use_kernels(before)


def cpu_operator(name: Operator) -> Callable[..., Any] | None:
    """Return the operator that computes on CPUs; None: PyTorch's operators do."""
    return CPU_OPERATORS.find(name) if CPU_OPERATORS.has_extra(name) else None


def describe_kernels() -> str:
    """Return which kernels are used."""
    return ", ".join(name for name in OPERATORS if name in _used) or "PyTorch's own"


def kernel_of(name: Operator, tensor: Tensor) -> Any | None:
    """Return the kernel that is to compute an operator on a tensor; None: PyTorch's operators are."""
    return _kernels[name] if name in _used and tensor.device.type in _DEVICES else None
