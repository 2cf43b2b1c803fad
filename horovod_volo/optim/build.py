"""An optimizer by name, and its state by parameter name.

The state exists from the start, so that ranks hold the same tensors before the first step and
a checkpoint needs no step to have somewhere to go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from horovod_volo.optim.adamw import AdamW
from horovod_volo.optim.apex_optimizers import fused_adam, fused_lamb
from horovod_volo.optim.lamb import Lamb
from horovod_volo.optim.lars import Lars

Name = Literal["adamw", "lamb", "lars", "sgd", "fusedadam", "fusedlamb"]

_BETAS = (0.9, 0.999)
_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KEYS: dict[Name, tuple[str, ...]] = {
    "adamw": ("step", *_MOMENTS),
    "lamb": ("step", *_MOMENTS),
    "lars": ("momentum_buffer",),
    "sgd": ("momentum_buffer",),
    "fusedadam": _MOMENTS,
    "fusedlamb": _MOMENTS,
}


def build_optimizer(name: Name, groups: list[dict[str, Any]], *, momentum: float) -> Optimizer:
    """Build an optimizer; the learning rate is set per step."""
    optimizer: Optimizer
    if name == "adamw":
        optimizer = AdamW(groups, betas=_BETAS, eps=1e-8)
    elif name == "lamb":
        optimizer = Lamb(groups, betas=_BETAS, eps=1e-6)
    elif name == "lars":
        optimizer = Lars(groups, momentum=momentum)
    elif name == "sgd":
        optimizer = SGD(groups, lr=0.0, momentum=momentum, fused=True)
    elif name == "fusedadam":
        optimizer = fused_adam(groups, betas=_BETAS, eps=1e-8)
    else:
        optimizer = fused_lamb(groups, betas=_BETAS, eps=1e-6)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {key: _fresh(key, parameter) for key in STATE_KEYS[name]}
    return optimizer


def _fresh(key: str, parameter: Tensor) -> Tensor:
    if key == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()


def state_tensors(optimizer: Optimizer, owned: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Name the optimizer's tensors by PARAMETER/KEY; the tensors are the live ones."""
    of_parameters = {
        f"{name}/{key}": tensor
        for name, parameter in owned.items()
        for key, tensor in optimizer.state[parameter].items()
    }
    # Apex counts the steps of a group, not of a parameter.
    counts = {
        f"group.{number}/step": group["step"]
        for number, group in enumerate(optimizer.param_groups)
        if isinstance(group.get("step"), Tensor)
    }
    return of_parameters | counts
