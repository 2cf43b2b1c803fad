"""SSD: a detector that predicts a box and class logits for each anchor from six feature maps.

A trunk gives the first map, at stride 8. Five pairs of convolutions give the smaller maps, and on each map a
convolution predicts the boxes and another the classes.

Invariant: the outputs are in the order of the anchors (objective/anchors.py): map after map, within a map
shape after shape, within a shape all positions, rows then columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.models.timm_api import create_model


class ExtraMap(NamedTuple):
    """The pair of convolutions that computes a map from the previous one."""

    width: int  # channels between the two
    channels: int
    halves: bool  # the second has stride 2; otherwise it has no padding, and takes 2 from the side


# 38 or 40 positions -> 19 or 20 -> 10 -> 5 -> 3 -> 1
EXTRA_MAPS = (
    ExtraMap(256, 512, halves=True),
    ExtraMap(256, 512, halves=True),
    ExtraMap(128, 256, halves=True),
    ExtraMap(128, 256, halves=False),
    ExtraMap(128, 256, halves=False),
)
ANCHORS_PER_POSITION = (4, 6, 6, 6, 4, 4)


class SSD(nn.Module):
    """SSD over any trunk that gives one map of `trunk_channels` at stride 8, for images of 300 or 320 px."""

    def __init__(
        self,
        trunk: nn.Module,
        trunk_channels: int,
        num_classes: int,
        *,
        extra_maps: tuple[ExtraMap, ...] = EXTRA_MAPS,
        anchors_per_position: tuple[int, ...] = ANCHORS_PER_POSITION,
    ) -> None:
        super().__init__()
        channels = [trunk_channels, *(extra.channels for extra in extra_maps)]
        if len(anchors_per_position) != len(channels):
            raise ValueError(f"{len(channels)} maps, but {len(anchors_per_position)} numbers of anchors")
        self.trunk = trunk
        self.logits_per_anchor = num_classes + 1  # class 0 is the background
        self.extras = nn.ModuleList(map(_extra_layers, channels, extra_maps))
        # Output channels are shape after shape, so that in channels-last memory the values of an anchor are
        # adjacent.
        heads = list(zip(channels, anchors_per_position, strict=True))
        self.box_heads = nn.ModuleList(nn.Conv2d(width, 4 * shapes, 3, padding=1) for width, shapes in heads)
        self.class_heads = nn.ModuleList(
            nn.Conv2d(width, self.logits_per_anchor * shapes, 3, padding=1) for width, shapes in heads
        )
        for new in (self.extras, self.box_heads, self.class_heads):
            new.apply(_init_weights)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps (batch, channels, side, side), from the largest to the smallest."""
        maps = [self.trunk(images)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        return maps

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoded boxes (batch, anchors, 4) and class logits (batch, anchors, classes + 1)."""
        maps = self.feature_maps(images)
        boxes = [_by_anchor(head(each), 4) for head, each in zip(self.box_heads, maps, strict=True)]
        logits = [
            _by_anchor(head(each), self.logits_per_anchor)
            for head, each in zip(self.class_heads, maps, strict=True)
        ]
        return torch.cat(boxes, dim=1), torch.cat(logits, dim=1)


class ResNetTrunk(nn.Module):
    """A ResNet up to its third stage, whose stride is 1 instead of 2; parameters have timm's names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        resnet = create_model(name, num_classes=0)
        if not hasattr(resnet, "layer3"):
            raise UserError(f"{name} cannot be the trunk of SSD: it is not one of timm's ResNets.")
        self.conv1, self.bn1, self.act1 = resnet.conv1, resnet.bn1, resnet.act1
        self.maxpool = resnet.maxpool
        self.layer1, self.layer2, self.layer3 = resnet.layer1, resnet.layer2, resnet.layer3
        _remove_stride(self.layer3, name)
        self.channels: int = resnet.feature_info[3]["num_chs"]

    def forward(self, images: Tensor) -> Tensor:
        """Return the map (batch, channels, side / 8, side / 8), the side rounded up."""
        maps = self.maxpool(self.act1(self.bn1(self.conv1(images))))
        result: Tensor = self.layer3(self.layer2(self.layer1(maps)))
        return result


def build_resnet_ssd(name: str, num_classes: int) -> SSD:
    """Build SSD over a ResNet of timm, as "resnet34" or "resnet50", with fresh weights."""
    trunk = ResNetTrunk(name)
    return SSD(trunk, trunk.channels, num_classes)


def _extra_layers(channels: int, extra: ExtraMap) -> nn.Sequential:
    stride, padding = (2, 1) if extra.halves else (1, 0)
    return nn.Sequential(
        nn.Conv2d(channels, extra.width, 1, bias=False),
        nn.BatchNorm2d(extra.width),
        nn.ReLU(inplace=True),
        nn.Conv2d(extra.width, extra.channels, 3, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(extra.channels),
        nn.ReLU(inplace=True),
    )


def _init_weights(module: nn.Module) -> None:
    """Initialize convolutions as published; biases keep torch's initialization."""
    if isinstance(module, nn.Conv2d):
        nn.init.xavier_uniform_(module.weight)


def _by_anchor(outputs: Tensor, values: int) -> Tensor:
    """Return the outputs of a head (batch, shapes x values, rows, columns) as (batch, anchors, values)."""
    of_shape = torch.unflatten(outputs, 1, (-1, values))  # (batch, shapes, values, rows, columns)
    return of_shape.permute(0, 1, 3, 4, 2).flatten(1, 3)


def _remove_stride(stage: nn.Module, name: str) -> None:
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
        elif not any(module.children()) and getattr(module, "stride", 1) not in (1, (1, 1)):
            raise UserError(
                f"{name} cannot be the trunk of SSD: it halves its maps with {type(module).__name__}, "
                "whose stride cannot be removed. Use resnet34 or resnet50."
            )
