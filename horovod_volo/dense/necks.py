"""Necks: from a backbone's maps to maps of the strides that UPerHead works on.

"lvvit" is the published LV-ViT's: each map through transposed convolutions or 1 x 1 convolutions, the last
with 2048 channels, strides 4, 8, 16, 16. "pyramid" is that of BEiT and MAE: strides 4, 8, 16, 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.dense.uperhead import draw_weights
from horovod_volo.models.sync_batch_norm import Steps, SyncBatchNorm, run_together

STRIDES = (4, 8, 16, 32)
_LAST_CHANNELS = 2048


class LvVitNeck(nn.Module):
    """The side layers of the published LV-ViT, under their names; maps of strides 4, 8, 16 and 16."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.channels = (*channels[:3], _LAST_CHANNELS)
        for number, (width, stride) in enumerate(zip(channels, strides, strict=True)):
            scale = stride // STRIDES[number]
            if number < 2 and scale > 1:
                layer = nn.Sequential(
                    nn.ConvTranspose2d(width, width, scale, stride=scale, bias=False),
                    SyncBatchNorm(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width, 1, bias=False),
                    SyncBatchNorm(width),
                    nn.ReLU(inplace=True),
                )
            else:
                layer = nn.Sequential(
                    nn.Conv2d(width, self.channels[number], 1, bias=False),
                    SyncBatchNorm(self.channels[number]),
                    nn.ReLU(inplace=True),
                )
            self.add_module(f"side_layer{number + 1}", layer)
        draw_weights(self)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return four maps (batch, channels, height, width)."""
        layers = [self.get_submodule(f"side_layer{number + 1}") for number in range(len(maps))]
        parts = [_side_steps(layer, each) for layer, each in zip(layers, maps, strict=True)]  # type: ignore[arg-type]
        return run_together(parts)


def _side_steps(layer: nn.Sequential, maps: Tensor) -> Steps:
    for module in layer:
        if isinstance(module, SyncBatchNorm):
            (maps,) = yield [module], [maps]
        else:
            maps = module(maps)
    return maps


class PyramidNeck(nn.Module):
    """Layer norm of each map, then transposed convolutions and pooling; maps of strides 4, 8, 16 and 32."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in channels)
        self.scales = nn.ModuleList(
            _scaling(width, stride, wanted)
            for width, stride, wanted in zip(channels, strides, STRIDES, strict=True)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return four maps (batch, channels, height, width)."""
        normed = (
            norm(each.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            for norm, each in zip(self.norms, maps, strict=True)
        )
        return [scale(each) for scale, each in zip(self.scales, normed, strict=True)]


def _scaling(width: int, stride: int, wanted: int) -> nn.Module:
    if stride == 4 * wanted:
        return nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, stride=2),
            SyncBatchNorm(width),
            nn.GELU(),
            nn.ConvTranspose2d(width, width, 2, stride=2),
        )
    if stride == 2 * wanted:
        return nn.ConvTranspose2d(width, width, 2, stride=2)
    return nn.Identity() if stride == wanted else nn.MaxPool2d(wanted // stride)


class NoNeck(nn.Module):
    """For a backbone whose maps have strides 4, 8, 16 and 32 already."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the maps."""
        return list(maps)


def build_neck(kind: str, channels: Sequence[int], strides: Sequence[int]) -> Any:
    """Build the neck that --neck names; maps that have the strides of a pyramid need none."""
    if tuple(strides) == STRIDES:
        return NoNeck(channels)
    return (LvVitNeck if kind == "lvvit" else PyramidNeck)(channels, strides)


def pad_to_multiple(images: Tensor, multiple: int) -> Tensor:
    """Pad normalised images at the right and the bottom with the mean colour, which is 0."""
    # Not -side % multiple, which torch.export cannot simplify where sides are dynamic.
    below, right = ((side + multiple - 1) // multiple * multiple - side for side in images.shape[2:])
    return F.pad(images, (0, right, 0, below))
