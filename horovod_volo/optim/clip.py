"""Bounds on the averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

Clip = Callable[[], object]
_SMALLEST_NORM = 1e-3  # of a unit's weights: those that are still 0 may begin to grow


def build_clip(
    mode: Literal["norm", "value", "agc"],
    bound: float,
    parameters: dict[str, Parameter],
    *,
    heads: Iterable[str],
    whole_norm: Callable[[Tensor], Tensor],
) -> Clip:
    """Return what bounds the gradients of `parameters` in place; a bound of 0 means none.

    `whole_norm` makes the norm of all gradients from that of this rank's part; AGC leaves `heads` alone.
    """
    every = list(parameters.values())
    if not bound:
        return lambda: None
    if mode == "norm":
        return partial(_clip_norm, every, bound, whole_norm)
    if mode == "value":
        return partial(nn.utils.clip_grad_value_, every, bound)
    beginnings = tuple(f"{head}." for head in heads)
    return partial(
        _clip_units, [p for name, p in parameters.items() if not name.startswith(beginnings)], bound
    )


def _clip_norm(parameters: list[Parameter], bound: float, whole_norm: Callable[[Tensor], Tensor]) -> None:
    own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, bound, whole_norm(own))


@torch.no_grad()
def _clip_units(parameters: list[Parameter], share: float) -> None:
    """Bound each unit's gradient norm by a share of its weights' norm: adaptive gradient clipping."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        largest = _unit_norms(parameter).clamp_(min=_SMALLEST_NORM).mul_(share)
        norms = _unit_norms(parameter.grad).clamp_(min=1e-6)
        parameter.grad.mul_((largest / norms).clamp_(max=1.0))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each row of a matrix or filter, of a vector the one of it all."""
    inputs = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else (0,)
    return torch.linalg.vector_norm(tensor, dim=inputs, keepdim=True) if tensor.ndim else tensor.abs()
