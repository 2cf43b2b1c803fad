"""The token-label loss as published, written out over all classes: what the sparse form is measured against.

A generous peer: the whole batch goes through at once, where the published code loops over images in
Python, and crops are cut by two matrix products, which cost less than a RoIAlign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_volo.config.schema import Objective
from horovod_volo.objective.loss import Labels
from horovod_volo.objective.mixtoken import Box


@dataclass(frozen=True)
class DenseLoss:
    """The loss of a pass with label maps, through targets of classes x tokens."""

    settings: Objective
    num_classes: int
    tokens_per_side: int

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        """Return the weighted sum of the class loss and the token loss."""
        class_target = self._target(labels, 1).squeeze(1)  # (batch, classes)
        mixed = box.kept_share * class_target + (1 - box.kept_share) * class_target.flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        token_loss = _soft_cross_entropy(token_logits, self._target(labels, self.tokens_per_side))
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def _target(self, labels: Labels, side: int) -> Tensor:
        """Return each crop's smoothed targets, (batch, side x side, classes)."""
        assert labels.scores is not None
        assert labels.ids is not None
        assert labels.boxes is not None
        scores = labels.scores.float()  # (batch, k, height, width)
        batch, _, height, width = scores.shape
        maps = torch.zeros(batch, self.num_classes, height, width, device=scores.device)
        maps.scatter_(1, labels.ids.long(), scores)
        top, left, tall, wide = labels.boxes.unbind(dim=1)
        rows = _averaging(top, tall, side, height).unsqueeze(1)  # (batch, 1, side, height)
        columns = _averaging(left, wide, side, width).unsqueeze(1)  # (batch, 1, side, width)
        crops = rows @ maps @ columns.mT  # (batch, classes, side, side)
        targets = crops.softmax(dim=1).flatten(2).mT  # (batch, side x side, classes)
        off = self.settings.smoothing / self.num_classes
        return targets * (1 - self.settings.smoothing + off) + off


def _averaging(start: Tensor, extent: Tensor, side: int, size: int) -> Tensor:
    """Return how much of every map cell goes into every output cell along one axis, (batch, side, size)."""
    low, high = start * size - 0.5, (start + extent) * size - 0.5  # (batch,) in cells
    bin_size = (high - low).clamp(min=1.0) / side
    samples = bin_size.ceil().clamp(max=math.ceil(size / side))
    first_bin = torch.arange(side, device=start.device) * bin_size[:, None] + low[:, None]  # (batch, side)
    cells = torch.arange(size, device=start.device)
    weights = torch.zeros(len(start), side, size, device=start.device)
    for sample in range(math.ceil(size / side)):
        position = first_bin + ((sample + 0.5) * bin_size / samples)[:, None]  # (batch, side)
        position = position.clamp(0, size - 1).unsqueeze(2)
        counted = (sample < samples)[:, None, None]
        weights += (1 - (position - cells).abs()).clamp(min=0) * counted
    return weights / samples[:, None, None]


def _soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
