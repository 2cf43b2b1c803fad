"""Networks with perturbed weights, so that no initial 0 or 1 hides a mistake, and images for them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def perturbed(model: Network, strength: float = 0.02) -> Network:
    """Perturb all weights and buffers, so that leaving one out changes the result."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(strength * torch.randn(parameter.shape, generator=random))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.5 * torch.rand(buffer.shape, generator=random))
    return model


def random_images(batch: int, side: int) -> Tensor:
    """Return images of a fixed seed."""
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(2))


def unchanged(tokens: Tensor) -> Tensor:
    """Swap no tokens."""
    return tokens
