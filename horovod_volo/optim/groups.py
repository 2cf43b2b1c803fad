"""Parameter groups: weight decay and layer-wise learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def parameter_groups(
    parameters: Mapping[str, Tensor],
    owned: Mapping[str, Parameter],
    *,
    exempt: Iterable[str],
    weight_decay: float,
    layers: Mapping[str, int],
    layer_decay: float,
) -> list[dict[str, Any]]:
    """Group the parameters that this rank updates by weight decay and by layer, as timm does.

    `exempt` names parameters without decay. A layer's learning rate is `layer_decay` times that of the
    layer above it; without `layers` all are equal.
    """
    undecayed = set(exempt)
    top = max(layers.values(), default=0)
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if name not in owned:
            continue
        plain = parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed
        decay, layer = 0.0 if plain else weight_decay, layers.get(name, top)
        if (layer, decay) not in groups:
            scale = layer_decay ** (top - layer)
            groups[layer, decay] = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups[layer, decay]["params"].append(owned[name])
    return list(groups.values())


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
