"""UPerHead and the auxiliary FCN head, under mmsegmentation's parameter names, and the neck before them.

The neck, the published LV-ViT's, makes maps of strides 4, 8, 16 and 16 of a backbone's. Given these, the
heads return logits (batch, classes, height, width) at the size of the first and of the third map. Each head
is written as steps that stop at its norms, so that norms that do not depend on each other share an exchange
between ranks (models/sync_batch_norm.py): four for the head, the auxiliary head's among the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.sync_batch_norm import Steps, SyncBatchNorm, run_together

_STRIDES = (4, 8)  # of the first maps
_LAST_CHANNELS = 2048  # of LV-ViT's neck
_POOLED_SIDES = (1, 2, 3, 6)
_PUBLISHED_WIDTH = 256
_DROPPED = 0.1  # of the channels before the classifier


class ConvUnit(nn.Module):
    """A convolution without bias, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = SyncBatchNorm(outputs)


def units(layers: Sequence[ConvUnit], inputs: Sequence[Tensor]) -> Steps:
    """Run units side by side; return their outputs."""
    maps = [unit.conv(each) for unit, each in zip(layers, inputs, strict=True)]
    normalized = yield [unit.bn for unit in layers], maps
    return [F.relu(each, inplace=True) for each in normalized]


class UPerHead(nn.Module):
    """Pyramid pooling on the last map, a feature pyramid over all of them, and a classifier."""

    def __init__(self, channels: Sequence[int], width: int, num_classes: int) -> None:
        super().__init__()
        *finer, last = channels
        # Pooling has no parameters; mmsegmentation numbers it as the first of two modules.
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), ConvUnit(last, width, 1)) for side in _POOLED_SIDES
        )
        self.bottleneck = ConvUnit(last + len(_POOLED_SIDES) * width, width, 3)
        self.lateral_convs = nn.ModuleList(ConvUnit(inputs, width, 1) for inputs in finer)
        self.fpn_convs = nn.ModuleList(ConvUnit(width, width, 3) for _ in finer)
        self.fpn_bottleneck = ConvUnit(len(channels) * width, width, 3)
        self.dropout = nn.Dropout2d(_DROPPED)
        self.conv_seg = nn.Conv2d(width, num_classes, 1)
        draw_weights(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return logits at the size of the first map."""
        logits: Tensor = run_together([self.steps(maps)])[0]
        return logits

    def steps(self, maps: Sequence[Tensor]) -> Steps:
        """Return logits at the size of the first map, in steps."""
        *finer, last = maps
        pairs: list[Any] = list(self.psp_modules)
        pooled_maps = [pair[0](last) for pair in pairs]
        layers: list[Any] = [*(pair[1] for pair in pairs), *self.lateral_convs]
        outputs = yield from units(layers, [*pooled_maps, *finer])
        pooled, laterals = outputs[: len(pooled_maps)], outputs[len(pooled_maps) :]
        joined = torch.cat([last, *(resized(each, last) for each in pooled)], dim=1)
        laterals += yield from units([self.bottleneck], [joined])
        for number in range(len(laterals) - 1, 0, -1):
            laterals[number - 1] = laterals[number - 1] + resized(laterals[number], laterals[number - 1])
        pyramid = yield from units(list(self.fpn_convs), laterals[:-1])  # type: ignore[arg-type]
        first: Tensor = pyramid[0]
        joined = torch.cat([first, *(resized(each, first) for each in [*pyramid[1:], laterals[-1]])], dim=1)
        (fused,) = yield from units([self.fpn_bottleneck], [joined])
        return self.conv_seg(self.dropout(fused))


class FCNHead(nn.Module):
    """One convolution and a classifier on the third map: it gives the auxiliary loss."""

    def __init__(self, channels: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ConvUnit(channels, width, 3)])
        self.dropout = nn.Dropout2d(_DROPPED)
        self.conv_seg = nn.Conv2d(width, num_classes, 1)
        draw_weights(self)

    def steps(self, maps: Sequence[Tensor]) -> Steps:
        """Return logits at the size of the third map, in steps."""
        (features,) = yield from units(list(self.convs), [maps[2]])  # type: ignore[arg-type]
        return self.conv_seg(self.dropout(features))


def resized(maps: Tensor, like: Tensor) -> Tensor:
    """Resize maps bilinearly to the height and width of others."""
    return F.interpolate(maps, size=like.shape[2:], mode="bilinear", align_corners=False)


def draw_weights(module: nn.Module) -> None:
    """Initialize convolutions for ReLU, and classifiers near zero."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
            if name.endswith("conv_seg"):
                # Published for 256 channels and more. Fewer would begin with logits too small to learn from.
                nn.init.normal_(part.weight, std=0.01 * max(1.0, _PUBLISHED_WIDTH / part.in_channels))
                assert part.bias is not None
                nn.init.zeros_(part.bias)
            else:
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


class LvVitNeck(nn.Module):
    """The side layers of the published LV-ViT, under their names; maps of strides 4, 8, 16 and 16."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.channels = (*channels[:3], _LAST_CHANNELS)
        scales = [stride // wanted for stride, wanted in zip(strides, _STRIDES, strict=False)]
        for number, width in enumerate(channels):
            layers: list[nn.Module] = []
            if number < len(scales) and scales[number] > 1:
                scale = scales[number]
                layers += [
                    nn.ConvTranspose2d(width, width, scale, stride=scale, bias=False),
                    SyncBatchNorm(width),
                    nn.ReLU(inplace=True),
                ]
            layers += [
                nn.Conv2d(width, self.channels[number], 1, bias=False),
                SyncBatchNorm(self.channels[number]),
                nn.ReLU(inplace=True),
            ]
            self.add_module(f"side_layer{number + 1}", nn.Sequential(*layers))
        draw_weights(self)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return four maps (batch, channels, height, width)."""
        parts = [_side_steps(layer, each) for layer, each in zip(self.children(), maps, strict=True)]  # type: ignore[arg-type]
        return run_together(parts)


def _side_steps(layer: nn.Sequential, maps: Tensor) -> Steps:
    for module in layer:
        if isinstance(module, SyncBatchNorm):
            (maps,) = yield [module], [maps]
        else:
            maps = module(maps)
    return maps


def pad_to_multiple(images: Tensor, multiple: int) -> Tensor:
    """Pad normalised images at the right and the bottom with the mean colour, which is 0."""
    # Not -side % multiple, which torch.export cannot simplify where sides are dynamic.
    below, right = ((side + multiple - 1) // multiple * multiple - side for side in images.shape[2:])
    return F.pad(images, (0, right, 0, below))
