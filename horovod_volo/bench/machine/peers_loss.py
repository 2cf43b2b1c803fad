"""The token-label loss written out over all classes: peers of the sparse form.

`PublishedLoss` follows the published code step by step. `DenseLoss` is the same formula in as few dense
tensor operations as possible, without loops over images or copies. Both crop the maps by two matrix products
where the published code calls RoIAlign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_volo.config.schema import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.objective.mixing import Box


@dataclass(frozen=True)
class DenseLoss:
    """The loss of a batch with label maps, through dense targets (classes x tokens)."""

    settings: Objective
    num_classes: int
    tokens_per_side: int
    dtype: torch.dtype = torch.float32

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        """Return the weighted sum of the class loss and the token loss."""
        class_target = self._target(labels, 1).squeeze(1)  # (batch, classes)
        mixed = box.lam * class_target + (1 - box.lam) * class_target.flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        token_loss = _soft_cross_entropy(token_logits, self._target(labels, self.tokens_per_side))
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def _target(self, labels: Labels, side: int) -> Tensor:
        """Return the smoothed targets of each crop, (batch, side x side, classes)."""
        scores, ids, boxes = _maps(labels, self.dtype)
        batch, _, height, width = scores.shape
        maps = scores.new_zeros(batch, self.num_classes, height, width)
        maps.scatter_(1, ids, scores)
        targets = _crops(maps, boxes, side).softmax(dim=1).flatten(2).mT  # (batch, side x side, classes)
        return _smoothed(targets, self.settings.smoothing, self.num_classes)


@dataclass(frozen=True)
class PublishedLoss:
    """The loss of a batch with label maps, in the published steps: one target tensor, then the loss."""

    settings: Objective
    num_classes: int
    tokens_per_side: int

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        """Return the weighted sum of the class loss and the token loss."""
        target = self.targets(labels)
        kept = box.lam
        mixed = kept * target[:, :, 1] + (1 - kept) * target[:, :, 1].flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        rows = target[:, :, 2:].transpose(1, 2).reshape(-1, self.num_classes)  # (batch x tokens, classes)
        token_loss = _soft_cross_entropy(token_logits.reshape(-1, self.num_classes), rows)
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def targets(self, labels: Labels) -> Tensor:
        """Return targets of the true class, the crop and each token, (batch, classes, 2 + tokens)."""
        scores, ids, boxes = _maps(labels, torch.float32)
        batch, _, height, width = scores.shape
        maps = torch.zeros(batch, self.num_classes, height, width, device=scores.device)
        for number in range(batch):
            maps[number].scatter_(0, ids[number], scores[number])
        off = self.settings.smoothing / self.num_classes
        truth = torch.full((batch, self.num_classes), off, device=scores.device)
        truth.scatter_(1, labels.classes.unsqueeze(1), 1 - self.settings.smoothing + off)
        of_crop, of_tokens = (
            _smoothed(
                _crops(maps, boxes, side).softmax(dim=1).flatten(2), self.settings.smoothing, self.num_classes
            )
            for side in (1, self.tokens_per_side)
        )
        return torch.cat([truth.unsqueeze(2), of_crop, of_tokens], dim=2)


def _maps(labels: Labels, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and ids, (batch, k, height, width) in `dtype` and int64, and boxes in `dtype`."""
    assert labels.maps is not None
    maps = labels.maps
    return maps.scores.to(dtype), maps.ids.long(), maps.boxes.to(dtype)


def _crops(maps: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Average (batch, classes, height, width) over the cells of each crop, (batch, classes, side, side)."""
    top, left, tall, wide = boxes.unbind(dim=1)
    rows = _averaging(top, tall, side, maps.shape[2]).unsqueeze(1)  # (batch, 1, side, height)
    columns = _averaging(left, wide, side, maps.shape[3]).unsqueeze(1)  # (batch, 1, side, width)
    return rows @ maps @ columns.mT


def _smoothed(targets: Tensor, smoothing: float, num_classes: int) -> Tensor:
    off = smoothing / num_classes
    return targets * (1 - smoothing + off) + off


def _averaging(start: Tensor, extent: Tensor, side: int, size: int) -> Tensor:
    """Return the weight of every map cell in every output cell along one axis, (batch, side, size)."""
    low, high = start * size - 0.5, (start + extent) * size - 0.5  # (batch,) in cells
    bin_size = (high - low).clamp(min=1.0) / side
    samples = bin_size.ceil().clamp(max=math.ceil(size / side))
    first_bin = torch.arange(side, device=start.device) * bin_size[:, None] + low[:, None]  # (batch, side)
    cells = torch.arange(size, device=start.device)
    weights = start.new_zeros(len(start), side, size)
    for sample in range(math.ceil(size / side)):
        position = first_bin + ((sample + 0.5) * bin_size / samples)[:, None]  # (batch, side)
        position = position.clamp(0, size - 1).unsqueeze(2)
        counted = (sample < samples)[:, None, None]
        weights += (1 - (position - cells).abs()).clamp(min=0) * counted
    return weights / samples[:, None, None]


def _soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
