"""SSD: a detector that predicts a box and class logits for each anchor from several feature maps.

A backbone gives the first map, at stride 8, or the first two. Pairs of convolutions give the smaller maps,
and on each map a convolution predicts the boxes and another the classes.

Invariant: the outputs are in the order of the anchors (dense/anchors.py): map after map, within a map
shape after shape, within a shape all positions, rows then columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.core.errors import UserError
from horovod_volo.dense.anchors import AnchorRule, anchor_rule, is_halved
from horovod_volo.dense.backbones import build_backbone
from horovod_volo.models.build import our_name
from horovod_volo.models.timm_api import LayerNorm2d, create_model, is_model

HEADS = ("box_heads", "class_heads")


class SSD(nn.Module):
    """SSD over any backbone whose maps `taps` have these channels, the first at stride 8."""

    def __init__(
        self,
        backbone: nn.Module,
        channels: Sequence[int],
        num_classes: int,
        rule: AnchorRule,
        taps: Sequence[int] = (0,),
    ) -> None:
        """Several taps are of transformers, whose maps end without a norm: each gets one."""
        super().__init__()
        self.backbone, self.taps = backbone, tuple(taps)
        self.norms = nn.ModuleList(
            LayerNorm2d(width, eps=1e-5) if len(taps) > 1 else nn.Identity() for width in channels
        )
        self.extras, of_maps = nn.ModuleList(), list(channels)
        for number in range(len(channels), len(rule.sides)):
            width, outputs = (256, 512) if number < 3 else (128, 256)  # as published
            self.extras.append(_extra_layers(of_maps[-1], width, outputs, is_halved(rule.sides[number - 1])))
            of_maps.append(outputs)
        # Channels are shape after shape: in channels-last memory the values of an anchor are adjacent.
        heads = list(zip(of_maps, rule.anchors_per_position, strict=True))
        self.values = (4, num_classes + 1)  # of each anchor; class 0 is the background
        self.box_heads, self.class_heads = (
            nn.ModuleList(nn.Conv2d(width, values * shapes, 3, padding=1) for width, shapes in heads)
            for values in self.values
        )
        for new in (self.extras, self.box_heads, self.class_heads):
            for module in new.modules():
                if isinstance(module, nn.Conv2d):  # as published; biases keep torch's initialization
                    nn.init.xavier_uniform_(module.weight)

    def feature_maps(self, images: Tensor, seed: int | None = None) -> list[Tensor]:
        """Return the maps (batch, channels, side, side), from the largest to the smallest."""
        found = self.backbone(images, seed)
        maps = [norm(found[tap]) for norm, tap in zip(self.norms, self.taps, strict=True)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        return maps

    def forward(self, images: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Return encoded boxes (batch, anchors, 4) and class logits (batch, anchors, classes + 1).

        In training, `seed` has 64 bits, for drop path.
        """
        maps = self.feature_maps(images, seed)
        boxes, logits = (
            torch.cat([_by_anchor(head(each), values) for head, each in zip(heads, maps, strict=True)], dim=1)
            for heads, values in zip((self.box_heads, self.class_heads), self.values, strict=True)
        )
        return boxes, logits

    def training_logits(self, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = self(images, seed)
        return outputs

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in getattr(self.backbone, "no_weight_decay", set)()}


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
        self.channels: tuple[int, ...] = (resnet.feature_info[3]["num_chs"],)
        self.unused = tuple(name for name, _ in resnet.named_children() if not hasattr(self, name))

    def forward(self, images: Tensor, drop_path_seed: int | None = None) -> list[Tensor]:  # noqa: ARG002
        """Return the map (batch, channels, side / 8, side / 8), the side rounded up."""
        maps = self.maxpool(self.act1(self.bn1(self.conv1(images))))
        return [self.layer3(self.layer2(self.layer1(maps)))]


def build_ssd(settings: Model, num_classes: int) -> SSD:
    """Build SSD with fresh weights over a ResNet of timm, as "resnet50", or over VOLO.

    VOLO gives the outlookers' map and, at stride 16, that of its last transformer stage.
    """
    name = our_name(settings.model)
    taps: tuple[int, ...] = (0,)
    if name.startswith("volo"):
        backbone, taps = build_backbone(settings), (0, -1)
    elif not is_model(name):
        raise UserError(f"{name} cannot be the trunk of SSD. Use a ResNet of timm, or VOLO.")
    elif settings.drop_path or settings.grad_checkpoint:
        raise UserError(f"SSD on {name} has no drop path and no --grad-checkpoint. Drop them, or use VOLO.")
    else:
        backbone = ResNetTrunk(name)
    channels = [backbone.channels[tap] for tap in taps]
    return SSD(backbone, channels, num_classes, anchor_rule(settings.img_size), taps)


def _extra_layers(channels: int, width: int, outputs: int, halves: bool) -> nn.Sequential:
    stride, padding = (2, 1) if halves else (1, 0)
    first = nn.Conv2d(channels, width, 1, bias=False)
    second = nn.Conv2d(width, outputs, 3, stride=stride, padding=padding, bias=False)
    return nn.Sequential(
        *(first, nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(second, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
    )


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
