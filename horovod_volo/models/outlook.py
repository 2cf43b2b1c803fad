"""Outlook attention: each centre's features are projected to attention weights over its k x k window.

The weighted values of overlapping windows are summed. Parameter names and, up to rounding, results are
timm's. timm unfolds the windows in memory and folds them; here, CPUs and GPUs each have an operator that does
neither. Invariant: both operators agree with `plain_outlook`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.core.operators import cpu_operator, kernel_of

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ON_CPU = cpu_operator("outlook attention")


def outlook(values: Tensor, logits: Tensor, geometry: list[int], scale: float) -> Tensor:
    """Return outlook attention of values (batch, height, width, channels), in the same shape.

    `logits` (batch, rows, columns, heads * kernel⁴) are attention logits: for each window, head and target
    position in the window, one per source position. `geometry` is rows and columns of windows, heads, kernel,
    padding, stride.
    """
    if values.dtype != logits.dtype:
        return plain_outlook(values, logits, geometry, scale)
    fused = kernel_of("outlook attention", values)
    if fused is not None and geometry[3:] == [3, 1, 2] and values.dtype in _KERNEL_DTYPES:
        result: Tensor = fused(values, logits, geometry[2], scale)[0]
        return result
    if values.device.type == "cpu" and _ON_CPU is not None:
        mixed: Tensor = _ON_CPU(values, logits, geometry, scale)[0]
        return mixed
    return plain_outlook(values, logits, geometry, scale)


def plain_outlook(values: Tensor, logits: Tensor, geometry: list[int], scale: float) -> Tensor:
    """Return outlook attention with PyTorch's unfold and fold, on any device."""
    rows, columns, heads, kernel, padding, stride = geometry
    batch, height, width, channels = values.shape
    positions, windows = kernel * kernel, rows * columns
    unfolded = F.unfold(values.permute(0, 3, 1, 2), kernel, padding=padding, stride=stride)
    sources = unfolded.view(batch, heads, channels // heads, positions, windows).permute(0, 1, 4, 3, 2)
    by_window = logits.reshape(batch, windows, heads, positions, positions).transpose(1, 2)
    weights = (by_window * scale).softmax(dim=-1)  # (batch, heads, windows, targets, sources)
    mixed = weights.to(sources.dtype) @ sources  # (batch, heads, windows, targets, width of a head)
    columns_of_windows = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * positions, windows)
    folded = F.fold(columns_of_windows, (height, width), kernel, padding=padding, stride=stride)
    return folded.permute(0, 2, 3, 1)


class Outlook(nn.Module):
    """timm's OutlookAttention, built from such a module, whose parameters it shares."""

    def __init__(self, timm_attention: Any) -> None:
        super().__init__()
        if timm_attention.attn_drop.p or timm_attention.proj_drop.p:
            raise ValueError("Outlook has no dropout. Build the model with attn_drop_rate=0.")
        self.v, self.attn, self.pool = timm_attention.v, timm_attention.attn, timm_attention.pool
        self.proj = timm_attention.proj
        self.num_heads, self.scale = timm_attention.num_heads, timm_attention.scale
        self.kernel_size, self.stride = timm_attention.kernel_size, timm_attention.stride
        self.padding = timm_attention.padding

    def forward(self, pixels: Tensor) -> Tensor:
        """Return pixels of the same shape (batch, height, width, channels)."""
        values, logits = self.v(pixels), self.logits(pixels)
        result: Tensor = self.proj(outlook(values, logits, self.geometry(logits), self.scale))
        return result

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the attention logits of windows (batch, rows, columns, heads * kernel⁴)."""
        # Permuted to channels first, the pixels have the channels-last memory format, which the pool keeps.
        result: Tensor = self.attn(self.pool(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return result

    def geometry(self, logits: Tensor) -> list[int]:
        """Return the geometry of the windows of these logits."""
        return [*logits.shape[1:3], self.num_heads, self.kernel_size, self.padding, self.stride]
