"""Outlook attention: each centre's features are projected to attention weights over its k x k window.

The weighted values of overlapping windows are summed. Parameters, their names and the results up to
rounding are timm's, which unfolds and folds in memory; here it is one operation per device. Invariant: all
implementations agree with `plain_outlook`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.kernels import runs_kernels
from horovod_volo.kernels.outlook import fused_outlook
from horovod_volo.models.outlook_gather import outlook_gather

_OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def outlook(
    values: Tensor, scores: Tensor, *, heads: int, kernel: int, padding: int, stride: int, scale: float
) -> Tensor:
    """Return (batch, height, width, channels), like the values.

    Scores (batch, rows, columns, heads * kernel⁴) are the attention logits of each window and head: for each
    target position, one per source position.
    """
    geometry = [scores.shape[1], scores.shape[2], heads, kernel, padding, stride]
    if values.dtype != scores.dtype:
        return plain_outlook(values, scores, geometry, scale)
    if values.device.type == "cpu":
        mixed: Tensor = outlook_gather(values, scores, geometry, scale)[0]
        return mixed
    if runs_kernels(values) and geometry[3:] == [3, 1, 2] and values.dtype in _OF_KERNELS:
        fused: Tensor = fused_outlook(values, scores, heads, scale)
        return fused
    return plain_outlook(values, scores, geometry, scale)


def plain_outlook(values: Tensor, scores: Tensor, geometry: list[int], scale: float) -> Tensor:
    """Return outlook attention with PyTorch's unfold and fold, on any device."""
    rows, columns, heads, kernel, padding, stride = geometry
    batch, height, width, channels = values.shape
    positions, windows = kernel * kernel, rows * columns
    unfolded = F.unfold(values.permute(0, 3, 1, 2), kernel, padding=padding, stride=stride)
    sources = unfolded.view(batch, heads, channels // heads, positions, windows).permute(0, 1, 4, 3, 2)
    by_window = scores.reshape(batch, windows, heads, positions, positions).transpose(1, 2)
    weights = (by_window * scale).softmax(dim=-1)  # (batch, heads, windows, targets, sources)
    mixed = weights.to(sources.dtype) @ sources  # (batch, heads, windows, targets, width of a head)
    columns_of_windows = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * positions, windows)
    folded = F.fold(columns_of_windows, (height, width), kernel, padding=padding, stride=stride)
    return folded.permute(0, 2, 3, 1)


class Outlook(nn.Module):
    """timm's OutlookAttention, built from a module of it with its parameters."""

    def __init__(self, trained: Any) -> None:
        super().__init__()
        if trained.attn_drop.p:
            raise ValueError("Outlook has no attention dropout. Build the model with attn_drop_rate=0.")
        self.v, self.attn, self.proj, self.proj_drop = (
            trained.v,
            trained.attn,
            trained.proj,
            trained.proj_drop,
        )
        self.pool = trained.pool
        self.num_heads, self.scale = trained.num_heads, trained.scale
        self.kernel_size, self.padding, self.stride = trained.kernel_size, trained.padding, trained.stride

    def forward(self, pixels: Tensor) -> Tensor:
        """Return pixels of the same shape (batch, height, width, channels)."""
        # As channels first, this is PyTorch's channels-last memory format, which the pool preserves.
        pooled = self.pool(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        mixed = outlook(
            self.v(pixels),
            self.attn(pooled),
            heads=self.num_heads,
            kernel=self.kernel_size,
            padding=self.padding,
            stride=self.stride,
            scale=self.scale,
        )
        projected: Tensor = self.proj_drop(self.proj(mixed))
        return projected
