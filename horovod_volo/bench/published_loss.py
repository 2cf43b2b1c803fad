"""The token-label loss in the published steps, with one dense target tensor, as a part of the published loop.

It crops the maps by two matrix products where the published code calls RoIAlign.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.objective.mixing import Box


@dataclass(frozen=True)
class PublishedLoss:
    """The loss of a batch with label maps in the published steps: one dense target tensor, then the loss."""

    settings: Objective
    num_classes: int
    tokens_per_side: int
    dtype: torch.dtype = torch.float32

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        targets = self.targets(labels)
        crop, tokens = targets[:, :, 1], targets[:, :, 2:].mT.reshape(-1, self.num_classes)
        mixed = box.lam * crop + (1 - box.lam) * crop.flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        token_loss = _soft_cross_entropy(token_logits.reshape(-1, self.num_classes), tokens)
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def targets(self, labels: Labels) -> Tensor:
        """Return targets of the true class, the crop and each token, (batch, classes, 2 + tokens)."""
        assert labels.maps is not None
        scores, ids = labels.maps.scores.to(self.dtype), labels.maps.ids.long()
        batch, _, height, width = scores.shape
        maps = scores.new_zeros(batch, self.num_classes, height, width)
        for number in range(batch):
            maps[number].scatter_(0, ids[number], scores[number])
        off = self.settings.smoothing / self.num_classes
        truth = scores.new_full((batch, self.num_classes), off)
        truth.scatter_(1, labels.classes.unsqueeze(1), 1 - self.settings.smoothing + off)
        crop, tokens = (
            _crops(maps, labels.maps.boxes.to(self.dtype), side).softmax(dim=1).flatten(2)
            * (1 - self.settings.smoothing + off)
            + off
            for side in (1, self.tokens_per_side)
        )
        return torch.cat([truth.unsqueeze(2), crop, tokens], dim=2)


def _crops(maps: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Average (batch, classes, height, width) over the cells of each crop, (batch, classes, side, side)."""
    top, left, tall, wide = boxes.unbind(dim=1)
    rows = _averaging(top, tall, side, maps.shape[2]).unsqueeze(1)  # (batch, 1, side, height)
    columns = _averaging(left, wide, side, maps.shape[3]).unsqueeze(1)  # (batch, 1, side, width)
    return rows @ maps @ columns.mT


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
