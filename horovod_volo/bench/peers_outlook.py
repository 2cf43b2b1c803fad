"""timm's outlook attention, the module itself and the operations between its linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models import timm_api  # noqa: F401  # without it timm cannot be imported everywhere


def timm_attention(channels: int, heads: int) -> nn.Module:
    """Return timm's module as VOLO builds it."""
    from timm.models.volo import OutlookAttention

    module: nn.Module = OutlookAttention(channels, heads, kernel_size=3, padding=1, stride=2)
    return module


def timm_core(values: Tensor, scores: Tensor, heads: int, scale: float) -> Tensor:
    """Do what that module does to values (batch, height, width, channels) and scores."""
    batch, height, width, channels = values.shape
    windows = scores.shape[1] * scores.shape[2]
    unfolded = F.unfold(values.permute(0, 3, 1, 2), kernel_size=3, padding=1, stride=2)
    sources = unfolded.reshape(batch, heads, channels // heads, 9, windows).permute(0, 1, 4, 3, 2)
    by_window = scores.reshape(batch, windows, heads, 9, 9).permute(0, 2, 1, 3, 4)
    mixed = (by_window * scale).softmax(dim=-1) @ sources
    columns = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * 9, windows)
    return F.fold(columns, (height, width), kernel_size=3, padding=1, stride=2).permute(0, 2, 3, 1)
