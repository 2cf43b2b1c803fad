"""Clipping of the averaged gradients: by global norm, by value, or by unit (AGC).

Clipping by the global norm divides all gradients by one number, which the optimizer's kernel does while it
reads them. The other two modes change the gradients in place.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

Clip = Callable[[], Tensor | None]
_SMALLEST_NORM = 1e-3  # assumed of a unit's weights at least, so that weights of 0 can grow


def build_clip(
    mode: Literal["norm", "value", "agc"],
    bound: float,
    parameters: dict[str, Parameter],
    *,
    flat_gradients: list[Tensor],
    heads: Iterable[str],
    global_grad_norm: Callable[[Tensor], Tensor],
) -> Clip:
    """Return a function that clips in place and returns None, or returns the divisor for `divide`.

    A bound of 0 is no clipping. `flat_gradients` hold this rank's gradients, padded by zeros;
    `global_grad_norm` computes the norm over all ranks from theirs. AGC does not clip `heads`.
    """
    if not bound:
        return lambda: None
    if mode == "norm":
        # max(1, norm / bound)
        return lambda: ((gradient_norm(flat_gradients, global_grad_norm) + 1e-6) / bound).clamp(min=1.0)
    if mode == "value":
        return partial(nn.utils.clip_grad_value_, list(parameters.values()), bound)  # returns None
    prefixes = tuple(f"{head}." for head in heads)
    return partial(_clip_units, [p for name, p in parameters.items() if not name.startswith(prefixes)], bound)


@torch.no_grad()
def divide(optimizer: Optimizer, divisor: Tensor | None) -> None:
    """Divide the gradients for the optimizer's next step; None: do nothing."""
    if divisor is None:
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # its kernel divides while it reads
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        return
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch._foreach_div_(gradients, divisor)


@torch.no_grad()
def gradient_norm(flats: list[Tensor], global_grad_norm: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the norm of the gradients of all ranks. Collective: every rank calls this."""
    return global_grad_norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(flats))))


@torch.no_grad()
def _clip_units(parameters: list[Parameter], bound: float) -> None:
    """Clip each unit's gradient norm to `bound` times its weights' norm: adaptive gradient clipping."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        largest = _unit_norms(parameter).clamp_(min=_SMALLEST_NORM).mul_(bound)
        norms = _unit_norms(parameter.grad).clamp_(min=1e-6)
        parameter.grad.mul_((largest / norms).clamp_(max=1.0))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each row of a matrix or filter, or of an entire vector."""
    inputs = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else (0,)
    return torch.linalg.vector_norm(tensor, dim=inputs, keepdim=True) if tensor.ndim else tensor.abs()
