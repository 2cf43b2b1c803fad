"""How long a layer's step is beside its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def trust_ratios(weights: Sequence[Tensor], steps: Sequence[Tensor], trust: float) -> list[Tensor]:
    """Return trust * |weights| / |step| for each layer, from the norms; 1 where either is 0."""
    weight, step = torch.stack(list(weights)), torch.stack(list(steps))
    ratios = torch.where((weight > 0) & (step > 0), trust * weight / step, 1.0)
    return list(ratios.unbind())
