"""The cross-entropy of pixels. Given logits at a fraction of the labels' height and width, it returns the
mean over all pixels of the cross-entropy of resized logits; as in mmsegmentation, ignored pixels count as 0.

Resized logits have batch x classes x pixels values. Here an image's exist at a time: its gradient is computed
with its loss, at the logits' own size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from horovod_volo.core.batch import IGNORED


class PixelLosses(NamedTuple):
    """The loss of a micro-batch, and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    pixel_loss: Tensor
    auxiliary_loss: Tensor


def pixel_losses(logits: Tensor, auxiliary: Tensor, labels: Tensor, auxiliary_weight: float) -> PixelLosses:
    """Return the losses of both heads, given labels (batch, height, width) uint8."""
    pixel_loss, auxiliary_loss = (pixel_cross_entropy(each, labels) for each in (logits, auxiliary))
    return PixelLosses(pixel_loss + auxiliary_weight * auxiliary_loss, pixel_loss, auxiliary_loss)


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
