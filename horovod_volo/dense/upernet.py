"""UperNet: a backbone, a neck, UPerHead and, in training, the auxiliary FCN head and the loss of both.

Given images (batch, 3, height, width) of any size, it returns logits at a quarter of the height and width
and, in training, auxiliary logits at a sixteenth. Parameters have mmsegmentation's names under `decode_head.`
and `auxiliary_head.`, those of the classification network under `backbone.`, and LV-ViT's under `neck.`.

Its loss is the mean over all pixels of the cross-entropy of logits resized to the labels' height and width;
as in mmsegmentation, ignored pixels count as 0. Resized logits have batch x classes x pixels values. Here
those of one image exist at a time: its gradient is computed with its loss, at the logits' own size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.dense.backbones import build_backbone, fit_backbone
from horovod_volo.dense.uperhead import FCNHead, LvVitNeck, UPerHead, pad_to_multiple
from horovod_volo.models.build import seed_torch
from horovod_volo.models.sync_batch_norm import run_together

HEADS = ("decode_head.conv_seg", "auxiliary_head.conv_seg")
_THEIR_NECK, _OUR_NECK = "backbone.side_layer", "neck.side_layer"  # in LV-ViT's repository and here
_STRIDE = 16
_AUXILIARY_WEIGHT = 0.4


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
        maps = self.neck(self.backbone(pad_to_multiple(images, _STRIDE), seed))
        seed_torch(images.device, seed >> 1)  # dropout draws from torch's generator, which takes 63 bits
        logits, auxiliary = run_together([self.decode_head.steps(maps), self.auxiliary_head.steps(maps)])
        return logits, auxiliary

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for evaluation, at a quarter of the padded height and width."""
        padded = pad_to_multiple(images, _STRIDE)
        logits: Tensor = self.decode_head(self.neck(self.backbone(padded)))
        return logits

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay."""
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


def fitted_weights(
    network: UperNet, given: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return weights under our names, tensors of the network that stay fresh, and messages.

    The weights are of such a network, from here or mmsegmentation, or of a backbone alone.
    """
    weights = {name.replace(_THEIR_NECK, _OUR_NECK): tensor for name, tensor in given.items()}
    messages = list[str]()
    is_whole = any(name.startswith("decode_head.") for name in weights)
    prefix = "backbone." if is_whole else ""
    body = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    others = {name: tensor for name, tensor in weights.items() if is_whole and not name.startswith(prefix)}
    fresh = [] if is_whole else [name for name in network.state_dict() if not name.startswith("backbone.")]
    if fresh:
        messages.append("neck and heads begin with fresh weights: these are of the backbone alone")
    kept, of_backbone = fit_backbone(network.backbone, body)
    messages += of_backbone
    return others | {f"backbone.{name}": tensor for name, tensor in kept.items()}, fresh, messages


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
    loss: Tensor = _PixelCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
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
