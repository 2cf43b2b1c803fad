"""UperNet: a backbone, a neck, UPerHead and, in training, the auxiliary FCN head and the loss of both.

Given images (batch, 3, height, width) of any size, it returns logits of that height and width; in training,
logits at a quarter of them and auxiliary logits at a sixteenth. Parameters have mmsegmentation's names under
`decode_head.` and `auxiliary_head.`, those of the classification network under `backbone.`, and LV-ViT's
under `neck.`.

Each head is written as steps that stop at its norms, so that norms that do not depend on each other share an
exchange between ranks (models/sync_batch_norm.py): four for the head, the auxiliary head's among the first.

The loss is the mean over all pixels of the cross-entropy of logits resized to the labels' height and width;
as in mmsegmentation, ignored pixels count as 0. Resized logits have batch x classes x pixels values. Here
those of one image exist at a time: its gradient is computed with its loss, at the logits' own size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.dense.backbones import build_backbone
from horovod_volo.models.build import seed_torch
from horovod_volo.models.sync_batch_norm import Steps, SyncBatchNorm, run_together

HEADS = ("decode_head.conv_seg", "auxiliary_head.conv_seg")
_STRIDE = 16
_AUXILIARY_WEIGHT = 0.4
_NECK_STRIDES = (4, 8)  # of the neck's first maps
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
        scales = [stride // wanted for stride, wanted in zip(strides, _NECK_STRIDES, strict=False)]
        for number, (width, outputs) in enumerate(zip(channels, self.channels, strict=True)):
            layers: list[nn.Module] = []
            if number < len(scales) and (scale := scales[number]) > 1:
                layers.append(nn.ConvTranspose2d(width, width, scale, stride=scale, bias=False))
                layers += [SyncBatchNorm(width), nn.ReLU(inplace=True)]
            layers.append(nn.Conv2d(width, outputs, 1, bias=False))
            layers += [SyncBatchNorm(outputs), nn.ReLU(inplace=True)]
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


def padded(images: Tensor) -> Tensor:
    """Pad normalised images at the right and the bottom with the mean colour, which is 0."""
    # Not -side % _STRIDE, which torch.export cannot simplify where sides are dynamic.
    below, right = ((side + _STRIDE - 1) // _STRIDE * _STRIDE - side for side in images.shape[2:])
    return F.pad(images, (0, right, 0, below))


class UperNet(nn.Module):
    """A network that classifies pixels."""

    def __init__(self, model: Model, settings: Segmentation, num_classes: int) -> None:
        """Build it with fresh weights from torch's random state."""
        super().__init__()
        self.backbone = build_backbone(model)
        self.neck = LvVitNeck(self.backbone.channels, self.backbone.strides)
        self.decode_head = UPerHead(self.neck.channels, settings.head_width, num_classes)
        self.auxiliary_head = FCNHead(self.neck.channels[2], settings.auxiliary_width, num_classes)

    def training_logits(self, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return logits and auxiliary logits; `seed` has 64 bits, for drop path and dropout."""
        maps = self.neck(self.backbone(padded(images), seed))
        seed_torch(images.device, seed >> 1)  # dropout draws from torch's generator, which takes 63 bits
        logits, auxiliary = run_together([self.decode_head.steps(maps), self.auxiliary_head.steps(maps)])
        return logits, auxiliary

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for evaluation in fp32, at the height and width of the images."""
        maps = self.neck(self.backbone(padded(images)))
        quarter = run_together([self.decode_head.steps(maps)])[0].float()
        padded_size = (4 * quarter.shape[2], 4 * quarter.shape[3])
        logits = F.interpolate(quarter, size=padded_size, mode="bilinear", align_corners=False)
        return logits[..., : images.shape[2], : images.shape[3]]

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameters of each layer as timm's patterns: those of the backbone, then all others."""
        groups = {
            name: _prefixed(patterns) for name, patterns in self.backbone.group_matcher(coarse=coarse).items()
        }
        return groups | {"heads": [(r"^(neck|decode_head|auxiliary_head)\.", (99999,))]}


def _prefixed(patterns: Any) -> Any:
    if isinstance(patterns, str):
        return patterns.replace("^", r"^backbone\.")
    return [(pattern.replace("^", r"^backbone\."), order) for pattern, order in patterns]


class PixelLosses(NamedTuple):
    """The loss of a micro-batch, and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    pixel_loss: Tensor
    auxiliary_loss: Tensor


def pixel_losses(logits: Tensor, auxiliary: Tensor, labels: Tensor) -> PixelLosses:
    """Return the losses of both heads, given labels (batch, height, width) uint8."""
    pixel_loss, auxiliary_loss = (pixel_cross_entropy(each, labels) for each in (logits, auxiliary))
    return PixelLosses(pixel_loss + _AUXILIARY_WEIGHT * auxiliary_loss, pixel_loss, auxiliary_loss)


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over labelled pixels, divided by all pixels: 0 where every pixel is ignored."""
    loss: Tensor = _PixelCrossEntropy.apply(logits, labels)
    return loss


class _PixelCrossEntropy(torch.autograd.Function):
    """The loss, whose gradient forward computes image by image."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        total = logits.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(logits)
        for number in range(len(logits)):
            one = logits[number : number + 1].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
                size = labels.shape[1:]
                resized = F.interpolate(one.float(), size=size, mode="bilinear", align_corners=False)
            loss = _loss_and_gradient_(resized.detach(), labels[number : number + 1, None])
            # What is in `resized` now is the gradient of the loss with respect to it.
            (gradient[number : number + 1],) = torch.autograd.grad(resized, one, resized.detach())
            total += loss
        context.save_for_backward(gradient)
        context.pixels = labels.numel()
        return total / labels.numel()

    @staticmethod
    def backward(context: Any, of_loss: Tensor) -> tuple[Tensor, None]:
        (gradient,) = context.saved_tensors
        return gradient * (of_loss / context.pixels).to(gradient.dtype), None


def _loss_and_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over labelled pixels; replace logits by its gradient in place."""
    labelled = labels != IGNORED
    classes = torch.where(labelled, labels, 0).long()  # (1, 1, height, width)
    logits -= logits.amax(dim=1, keepdim=True)
    of_label = logits.gather(1, classes)
    exponentials = logits.exp_()
    sums = exponentials.sum(dim=1, keepdim=True)
    loss = ((sums.log() - of_label) * labelled).sum()
    probabilities = exponentials.div_(sums)
    probabilities.scatter_add_(1, classes, torch.full_like(of_label, -1.0)).mul_(labelled)
    return loss
