"""Networks with perturbed weights, so that no initial 0 or 1 hides a mistake, and images for them."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from horovod_volo.models.lvvit import LvVit

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


def without_aux_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict as a network without an auxiliary head has it."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("aux_head.")}


def small_lvvit(drop_path: float = 0.0, img_size: int = 64, **settings: Any) -> LvVit:
    """Build a small LV-ViT for ten classes."""
    torch.manual_seed(0)
    sizes = {"layers": 3, "embed_dim": 48, "num_heads": 4, "stem_width": 8, "residual_divisor": 2.0}
    return LvVit(img_size=img_size, num_classes=10, drop_path=drop_path, **sizes | settings)
