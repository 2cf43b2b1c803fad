"""The attention that each position of an image receives in an outlooker, to look at.

In a window, every target position distributes its attention over all positions of the window. What a position
receives, summed over targets and windows, is 1 on average inside the image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.outlook import Outlook
from horovod_volo.models.volo import Volo


@torch.no_grad()
def received_attention(network: nn.Module, images: Tensor) -> Tensor | None:
    """Return the attention that positions receive in the last outlooker (batch, rows, columns); None without.

    The network evaluates the images, and is left as it was.
    """
    if not isinstance(network, Volo):
        return None
    modes = {module: module.training for module in network.modules()}  # frozen batch norm does not train
    network.eval()
    try:
        tokens = network.stem(images)
        *before, last = network.network[0]
        for block in before:
            tokens = block(tokens)
        return _received(last.attn, last.norm1(tokens))
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _received(attention: Outlook, tokens: Tensor) -> Tensor:
    """Return what positions of tokens (batch, height, width, channels) receive (batch, height, width)."""
    height, width = tokens.shape[1:3]
    pooled = attention.pool(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    positions = attention.kernel_size**2
    logits = attention.attn(pooled).flatten(1, 2).unflatten(2, (attention.num_heads, positions, positions))
    weights = (logits.float() * attention.scale).softmax(dim=-1)  # (batch, windows, heads, targets, sources)
    by_source = weights.mean(dim=2).sum(dim=2).transpose(1, 2)  # (batch, sources, windows)
    fold = {"kernel_size": attention.kernel_size, "padding": attention.padding, "stride": attention.stride}
    received = F.fold(by_source, (height, width), **fold)
    windows = F.fold(torch.ones_like(by_source), (height, width), **fold)  # that contain a position
    return (received / windows).squeeze(1)
