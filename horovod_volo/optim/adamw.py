"""AdamW over a network's parameters, and its state by parameter name.

The state exists from the start, so that ranks hold the same tensors before the first step and
a checkpoint needs no step to have somewhere to go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


def build_optimizer(model: nn.Module, *, exempt: Iterable[str], weight_decay: float) -> AdamW:
    """Build fused AdamW; the learning rate is set per step. `exempt` names parameters without decay."""
    groups = parameter_groups(model, exempt=exempt, weight_decay=weight_decay)
    optimizer = AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def parameter_groups(model: nn.Module, *, exempt: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters as timm does: those that decay, and those that must not."""
    names = set(exempt)
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim <= 1 or name.endswith(".bias") or name in names:
            undecayed.append(parameter)
        else:
            decayed.append(parameter)
    return [
        {"params": undecayed, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": weight_decay},
    ]


def set_lr(optimizer: AdamW, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_tensors(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """Name the optimizer's tensors; the tensors are the live ones."""
    return {
        f"{name}/{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }
