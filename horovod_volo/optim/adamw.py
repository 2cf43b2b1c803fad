"""AdamW by torch's fused kernel. Given the averaged gradients and `grad_scale`, the divisor that bounds their
norm, one call per group updates the weights and both moments.

The lists of tensors passed to the kernel are built once, not in every step, where this would take a
millisecond in Python for 250 parameters. Invariant: state tensors are never replaced; a checkpoint is
restored into them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamW(Optimizer):
    """AdamW, bit for bit `torch.optim.AdamW(fused=True)`.

    As there, the kernel divides the gradients by the attribute `grad_scale`, and a non-zero `found_inf` skips
    the step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # With this attribute GradScaler passes an overflow to the kernel instead of waiting for the device.
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        overflow: Tensor | None = getattr(self, "found_inf", None)
        for group, (weights, means, squares, steps) in zip(
            self._elementwise_groups(), self._columns, strict=True
        ):
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                weights,
                [weight.grad for weight in weights],
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=overflow,
            )
            if overflow is not None:
                torch._foreach_sub_(steps, [overflow] * len(steps))  # a skipped step is not counted

    def _elementwise_groups(self) -> list[dict[str, Any]]:
        """Return the groups to update so: all, unless a subclass updates some otherwise."""
        return self.param_groups

    @cached_property
    def _columns(self) -> list[tuple[list[Any], ...]]:
        """Return the weights, first and second moments and step counts of each group."""
        columns = []
        for group in self._elementwise_groups():
            weights = [weight for weight in group["params"] if weight.requires_grad]
            state = [self.state[weight] for weight in weights]
            moments = ([row[key] for row in state] for key in ("exp_avg", "exp_avg_sq", "step"))
            columns.append((weights, *moments))
        return columns
