"""LAMB and LARS: each layer's step is scaled to the norm of the layer's own weights."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from horovod_volo.optim.build import ADAM_STATE, BETAS, MOMENTUM_STATE, register_optimizer

_LARS_TRUST = 1e-3  # norm of the step as a fraction of the weights' norm, at a learning rate of 1


def trust_ratios(weights: Sequence[Tensor], steps: Sequence[Tensor], trust: float) -> list[Tensor]:
    """Return trust * |weights| / |step| for each layer, from the norms; 1 where either is 0."""
    weight, step = torch.stack(list(weights)), torch.stack(list(steps))
    return list(torch.where((weight > 0) & (step > 0), trust * weight / step, 1.0).unbind())


class Lamb(Optimizer):
    """u <- m / (sqrt(v) + eps) + decay w; w <- w - lr (|w| / |u|) u, with Adam's bias-corrected m and v.

    In groups without weight decay (norms and biases) the ratio |w| / |u| is 1.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            weights, decay = group["params"], group["weight_decay"]
            updates = self._updates(group)
            if decay:
                torch._foreach_add_(updates, weights, alpha=decay)
                ratios = trust_ratios(torch._foreach_norm(weights), torch._foreach_norm(updates), 1.0)
                torch._foreach_mul_(updates, ratios)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(self, group: dict[str, Any]) -> list[Tensor]:
        """Return m / (sqrt(v) + eps) for each weight: the change that Adam makes at a learning rate of -1."""
        (beta1, beta2), eps, weights = group["betas"], group["eps"], group["params"]
        gradients, states = [weight.grad for weight in weights], [self.state[weight] for weight in weights]
        means, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        updates = [torch.zeros_like(weight) for weight in weights]
        rates = {"lr": -1.0, "weight_decay": 0.0, "beta1": beta1, "beta2": beta2, "eps": eps}
        adam(
            updates, gradients, means, squares, [], steps, **rates, fused=True, amsgrad=False, maximize=False
        )
        return updates


class Lars(Optimizer):
    """v <- momentum v + ratio (g + decay w); w <- w - lr v.

    The ratio is trust |w| / (|g| + decay |w|), and 1 in groups without weight decay (norms and biases).
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            weights, decay = group["params"], group["weight_decay"]
            gradients = [weight.grad for weight in weights]
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            if decay:
                norms = torch._foreach_norm(weights)
                sizes = torch._foreach_add(torch._foreach_norm(gradients), norms, alpha=decay)
                directions = torch._foreach_add(gradients, weights, alpha=decay)
                torch._foreach_mul_(directions, trust_ratios(norms, sizes, _LARS_TRUST))
                torch._foreach_add_(buffers, directions)
            else:
                torch._foreach_add_(buffers, gradients)
            torch._foreach_add_(weights, buffers, alpha=-group["lr"])


register_optimizer("lamb", partial(Lamb, betas=BETAS, eps=1e-6), state_keys=ADAM_STATE)
register_optimizer("lars", Lars, state_keys=MOMENTUM_STATE)
