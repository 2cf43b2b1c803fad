"""Batches of images and labels, from the loader to the loss or the evaluation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = 255  # label of pixels that count in no loss and no metric
NO_CLASS = -1  # class number of an image that cannot be read, and of the cells of a missing label map


@dataclass(frozen=True, eq=False)
class LabelMaps:
    """Token-label maps, flipped like their images, and the crops as boxes of the maps."""

    scores: Tensor  # (batch, k, height, width) logits, float16 in the stores
    ids: Tensor  # (batch, k, height, width) integer class numbers of the scores
    boxes: Tensor  # (batch, 4) top, left, height, width as fractions of the flipped map
    reach: float = 1.0  # the largest height or width of the boxes, at least 1; known on the host

    def to(self, device: torch.device) -> "LabelMaps":
        """Return a copy on a device; the host does not wait for it."""
        scores, ids, boxes = (copy_async(part, device) for part in (self.scores, self.ids, self.boxes))
        return LabelMaps(scores, ids, boxes, self.reach)


@dataclass(frozen=True, eq=False)
class Labels:
    """The class of each image and, where a run has them, its label map."""

    classes: Tensor  # (batch,) integer
    maps: LabelMaps | None = None

    def to(self, device: torch.device) -> "Labels":
        """Return a copy on a device; the host does not wait for it."""
        maps = None if self.maps is None else self.maps.to(device)
        return Labels(copy_async(self.classes, device), maps)


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One micro-batch; the tensors are on the rank's device, the indices on the host."""

    images: Tensor  # (batch, 3, image_size, image_size) float32, normalised
    labels: Labels
    indices: NDArray[np.int64]  # (batch,) positions in the catalog
    # (batch,) numbers that the epoch's order has here: positions, which differ from `indices` where an image
    # is damaged, or with --balance or --aug-repeats the numbers of draws (data/sampler.py)
    drawn: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EvalBatch:
    """One batch of evaluation images; the tensors are on the rank's device, the indices on the host."""

    images: Tensor  # (batch, 3, image_size, image_size) fp32, normalised
    classes: Tensor  # (batch,) int64; NO_CLASS where the image is damaged
    indices: NDArray[np.int64]  # (batch,) positions in the catalog


def copy_async(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Copy host values to a device through pinned memory without waiting; for the CPU, do not copy."""
    tensor = torch.as_tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
