"""The labels of a training batch, from the reading of their files to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LabelMaps:
    """Token-label maps, flipped like their images, and the crops as boxes of the maps."""

    scores: Tensor  # (batch, k, height, width) logits, float16 in the stores
    ids: Tensor  # (batch, k, height, width) integer class numbers of the scores
    boxes: Tensor  # (batch, 4) top, left, height, width as fractions of the flipped map
    reach: float = 1.0  # the largest height or width of the boxes, at least 1; known on the host

    def to(self, device: torch.device) -> LabelMaps:
        """Return a copy on a device; the host does not wait for it."""
        scores, ids, boxes = (copy_async(part, device) for part in (self.scores, self.ids, self.boxes))
        return LabelMaps(scores, ids, boxes, self.reach)


@dataclass(frozen=True, eq=False)
class Labels:
    """The class of each image and, where a run has them, its label map."""

    classes: Tensor  # (batch,) integer
    maps: LabelMaps | None = None

    def to(self, device: torch.device) -> Labels:
        """Return a copy on a device; the host does not wait for it."""
        maps = None if self.maps is None else self.maps.to(device)
        return Labels(copy_async(self.classes, device), maps)


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device through pinned memory, without waiting; to the CPU, return it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
