"""LAMB: Adam's step, layer by layer, of the length of the layer's own norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horovod_volo.optim.ratio import trust_ratios


class Lamb(Optimizer):
    """u <- m / (sqrt(v) + eps) + decay w; w <- w - rate (|w| / |u|) u, of Adam's corrected m and v.

    Where weights do not decay, norms and biases, the ratio is 1.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        for group in self.param_groups:
            weights, decay = group["params"], group["weight_decay"]
            updates = self._updates(group)
            if decay:
                torch._foreach_add_(updates, weights, alpha=decay)
                ratios = trust_ratios(torch._foreach_norm(weights), torch._foreach_norm(updates), 1.0)
                torch._foreach_mul_(updates, ratios)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(self, group: dict[str, Any]) -> list[torch.Tensor]:
        (beta1, beta2), weights = group["betas"], group["params"]
        gradients = [weight.grad for weight in weights]
        states = [self.state[weight] for weight in weights]
        means, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # Corrections stay tensors: the host must not wait for the step count.
        corrections = [torch._foreach_pow(beta, steps) for beta in (beta1, beta2)]
        for correction in corrections:
            torch._foreach_neg_(correction)
            torch._foreach_add_(correction, 1)
        divisors = torch._foreach_div(squares, corrections[1])
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, corrections[0])
        torch._foreach_div_(updates, divisors)
        return list(updates)
