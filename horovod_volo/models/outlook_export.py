"""Outlook attention from operations that all ONNX runtimes support.

ONNX represents a fold by Col2Im, which TensorRT and others lack, and an unfold by gathers of computed
indices. Here both are grouped convolutions with one-hot weights, which are exact. Invariant: in evaluation
the logits equal those of the trained model.
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
    """Return one-hot weights (channels * kernel², 1, kernel, kernel), one per position of a window."""
    places = kernel * kernel
    return torch.eye(places).reshape(places, 1, kernel, kernel).repeat(channels, 1, 1, 1)


def unfold_windows(cells: Tensor, weights: Tensor, *, padding: int, stride: int) -> Tensor:
    """Return F.unfold with the windows as a grid: (batch, channels * kernel², rows, columns)."""
    return F.conv2d(cells, weights, padding=padding, stride=stride, groups=cells.shape[1])


def fold_windows(
    windows: Tensor, weights: Tensor, size: tuple[int, int], *, padding: int, stride: int
) -> Tensor:
    """Sum overlapping windows (batch, channels * kernel², rows, columns), as F.fold does."""
    kernel = weights.shape[-1]
    # Cells to the right of and below the last window, which an unfold of this size does not read.
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
    """Outlook attention with the parameters of a timm module, for evaluation only."""

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
        weights = (scores.transpose(1, 2) * self.scale).softmax(dim=-1)
        mixed = weights @ windows.permute(0, 1, 4, 3, 2)  # (batch, heads, windows, places, width)
        mixed = mixed.permute(0, 1, 4, 3, 2).reshape(-1, channels, rows, columns)
        folded = fold_windows(mixed, self.weights, size, **geometry)
        projected: Tensor = self.projection(folded.permute(0, 2, 3, 1))
        return projected


def exportable(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode; in a VOLO, outlook attention is replaced by the one above."""
    own = copy.deepcopy(network).eval()
    if isinstance(own, VOLO):
        for block in list(own.modules()):
            attention = getattr(block, "attn", None)
            # All of timm's attention modules have this name; only outlook attention has an unfold.
            unfolds = isinstance(getattr(attention, "unfold", None), nn.Unfold)
            if unfolds or isinstance(attention, Outlook):
                block.attn = ConvolvedOutlook(attention)
    return own
