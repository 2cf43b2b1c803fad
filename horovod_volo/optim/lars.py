"""LARS: momentum SGD whose step, layer by layer, is a share of the layer's own norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horovod_volo.optim.ratio import trust_ratios

_TRUST = 1e-3  # the step's norm as a share of the weights', at a rate of 1


class Lars(Optimizer):
    """v <- momentum v + ratio (g + decay w); w <- w - rate v.

    The ratio is TRUST |w| / (|g| + decay |w|) where weights decay, and 1 where they do not: norms and biases.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        for group in self.param_groups:
            weights, decay = group["params"], group["weight_decay"]
            gradients = [weight.grad for weight in weights]
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            if decay:
                norms = torch._foreach_norm(weights)
                sizes = torch._foreach_add(torch._foreach_norm(gradients), norms, alpha=decay)
                directions = torch._foreach_add(gradients, weights, alpha=decay)
                torch._foreach_mul_(directions, trust_ratios(norms, sizes, _TRUST))
                torch._foreach_add_(buffers, directions)
            else:
                torch._foreach_add_(buffers, gradients)
            torch._foreach_add_(weights, buffers, alpha=-group["lr"])
