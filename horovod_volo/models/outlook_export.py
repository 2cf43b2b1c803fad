"""Outlook attention made of operations that every runtime of exported networks has.

A fold becomes ONNX's Col2Im, which TensorRT and others lack, and an unfold becomes lookups of computed
indices. Both are grouped convolutions with weights that are 1 at one place and 0 elsewhere: what they give
is exact. Invariant: in evaluation the logits are those of the network as it was trained.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.outlook import Outlook
from horovod_volo.models.timm_api import VOLO


def place_weights(channels: int, kernel: int) -> Tensor:
    """Return weights (channels * kernel², 1, kernel, kernel), each of which picks one place of a window."""
    places = kernel * kernel
    return torch.eye(places).reshape(places, 1, kernel, kernel).repeat(channels, 1, 1, 1)


def unfold_windows(cells: Tensor, weights: Tensor, *, padding: int, stride: int) -> Tensor:
    """Return what F.unfold does, its windows still a grid: (batch, channels * kernel², rows, columns)."""
    return F.conv2d(cells, weights, padding=padding, stride=stride, groups=cells.shape[1])


def fold_windows(
    windows: Tensor, weights: Tensor, size: tuple[int, int], *, padding: int, stride: int
) -> Tensor:
    """Add up windows (batch, channels * kernel², rows, columns) where they overlap, as F.fold does."""
    kernel = weights.shape[-1]
    # Cells right and below of the last window, which an unfold of this size never reaches.
    beyond = [
        whole - ((count - 1) * stride - 2 * padding + kernel)
        for whole, count in zip(size, windows.shape[2:], strict=True)
    ]
    return F.conv_transpose2d(
        windows,
        weights,
        stride=stride,
        padding=padding,
        output_padding=beyond,
        groups=windows.shape[1] // kernel**2,
    )


class ConvolvedOutlook(nn.Module):
    """Outlook attention with the weights of timm's, for evaluation alone."""

    weights: Tensor

    def __init__(self, trained: Any) -> None:
        super().__init__()
        self.values, self.attention, self.projection = trained.v, trained.attn, trained.proj
        self.pool = trained.pool
        self.heads, self.scale = trained.num_heads, trained.scale
        self.kernel, self.padding, self.stride = trained.kernel_size, trained.padding, trained.stride
        weights = place_weights(trained.v.out_features, self.kernel).to(trained.v.weight)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, cells: Tensor) -> Tensor:
        """Return cells of the same shape (batch, rows, columns, channels)."""
        size = (cells.shape[1], cells.shape[2])
        places = self.kernel**2
        geometry = {"padding": self.padding, "stride": self.stride}
        values = self.values(cells).permute(0, 3, 1, 2)
        unfolded = unfold_windows(values, self.weights, **geometry)
        channels, rows, columns = unfolded.shape[1:]
        windows = unfolded.reshape(-1, self.heads, channels // self.heads // places, places, rows * columns)
        pooled = self.pool(cells.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        scores = self.attention(pooled).reshape(-1, rows * columns, self.heads, places, places)
        shares = (scores.transpose(1, 2) * self.scale).softmax(dim=-1)
        mixed = shares @ windows.permute(0, 1, 4, 3, 2)  # (batch, heads, windows, places, width)
        mixed = mixed.permute(0, 1, 4, 3, 2).reshape(-1, channels, rows, columns)
        folded = fold_windows(mixed, self.weights, size, **geometry)
        projected: Tensor = self.projection(folded.permute(0, 2, 3, 1))
        return projected


def exportable(network: nn.Module) -> nn.Module:
    """Return a copy to export, in evaluation mode; of a VOLO, with the outlook attention above."""
    own = copy.deepcopy(network).eval()
    if isinstance(own, VOLO):
        for block in list(own.modules()):
            attention = getattr(block, "attn", None)
            # Of timm's attentions, all in this place and of this name, only outlook attention unfolds.
            unfolds = isinstance(getattr(attention, "unfold", None), nn.Unfold)
            if unfolds or isinstance(attention, Outlook):
                block.attn = ConvolvedOutlook(attention)
    return own
