"""The loss of SSD: smooth L1 of encoded boxes, and the cross-entropy of classes with hard-negative mining.

Of an image with n positive anchors, the n positives and the 3 n background anchors of greatest cross-entropy
count; the image's loss is divided by n. An image without positives has the loss 0, and so have its gradients.

Invariant: all shapes are fixed by the batch, so that nothing synchronizes with the device and every rank
computes the same graph, whatever boxes its images have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from horovod_volo.dense.anchors import BoxTargets

NEGATIVES_PER_POSITIVE = 3


class DetectionLoss(NamedTuple):
    """The loss of a micro-batch, and its two terms: fp32 scalars on the device."""

    total: Tensor
    box_loss: Tensor
    class_loss: Tensor


def detection_loss(box_values: Tensor, class_logits: Tensor, targets: BoxTargets) -> DetectionLoss:
    """Return the mean over images of smooth L1 and cross-entropy, in fp32 whatever the outputs' dtype.

    The outputs are encoded boxes (batch, anchors, 4) and logits (batch, anchors, classes + 1).
    """
    positive = targets.classes > 0  # (batch, anchors)
    positives = positive.sum(dim=1)  # (batch,)
    distances = F.smooth_l1_loss(box_values.float(), targets.boxes, reduction="none").sum(dim=2)
    of_boxes = distances.where(positive, 0.0).sum(dim=1)

    # One row per anchor; in fp32, because a half-precision softmax would lose small probabilities.
    entropies = F.cross_entropy(
        class_logits.float().flatten(0, 1), targets.classes.flatten(), reduction="none"
    ).view_as(positive)
    of_positives = entropies.where(positive, 0.0).sum(dim=1)
    # Positives are 0 here: no cross-entropy is less, so they replace no negative and add nothing to the sum.
    hardest = entropies.masked_fill(positive, 0.0).sort(dim=1, descending=True).values
    ranks = torch.arange(hardest.shape[1], device=hardest.device)
    mined = ranks < NEGATIVES_PER_POSITIVE * positives.unsqueeze(1)  # (batch, anchors)
    of_classes = of_positives + hardest.where(mined, 0.0).sum(dim=1)

    divisor = positives.clamp(min=1)  # without positives, both numerators are 0
    box_loss, class_loss = (of_boxes / divisor).mean(), (of_classes / divisor).mean()
    return DetectionLoss(box_loss + class_loss, box_loss, class_loss)
