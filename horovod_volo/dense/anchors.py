"""Anchors of SSD: their boxes, the targets that ground-truth boxes give them, and the loss.

Boxes are left, top, right, bottom in fractions of the image, unless a name says otherwise. Classes count from
1; class 0 is the background of an anchor, and marks padding among the ground-truth boxes of a batch.

Invariant: anchors are in the order of the network's outputs (dense/ssd.py): map after map, within a map
shape after shape, within a shape all positions, rows then columns.

The loss is smooth L1 of encoded boxes, and the cross-entropy of classes with hard-negative mining: of an
image with n positive anchors, the n positives and the 3 n background anchors of greatest cross-entropy count;
the image's loss is divided by n. An image without positives has the loss 0, and so have its gradients.

Invariant: all shapes are fixed by the batch, so that nothing synchronizes with the device and every rank
computes the same graph, whatever boxes its images have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Encoded boxes are multiplied by these: SSD's variances 0.1 and 0.2.
_CENTRE_SCALE, _SIZE_SCALE = 10.0, 5.0
NEGATIVES_PER_POSITIVE = 3
_CRITERION = 0.5  # the IoU with a box above which an anchor gets it
_BLOCK, _BLOCK_ON_CPU = 1 << 24, 1 << 18  # overlaps computed together, 4 bytes each; a CPU's caches hold few


@dataclass(frozen=True)
class AnchorRule:
    """The positions and shapes of anchors on the feature maps of a square image; lengths are in pixels."""

    image_size: int
    sides: tuple[int, ...]  # positions along the side of each map
    steps: tuple[float, ...]  # from one position of each map to the next
    sizes: tuple[float, ...]  # of the square anchor of each map; the last is beyond the last map
    ratios: tuple[tuple[float, ...], ...]  # width / height of oblong anchors, which are also transposed

    @property
    def anchors_per_position(self) -> tuple[int, ...]:
        """Return the number of shapes on each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.ratios)


_SMALLEST, _SECOND, _BEYOND = 0.07, 0.15, 1.05  # sizes of SSD's anchors, fractions of the image


def is_halved(side: int) -> bool:
    """Return whether the map after one of this side has half of it; else a convolution takes 2 from it."""
    return side > 5 or side == 2


def anchor_rule(image_size: int) -> AnchorRule:
    """Return SSD's rule for an image size: that of SSD300 and SSD512, and the same between them.

    Maps begin at stride 8 and halve; the sizes of their anchors are equally spaced fractions of the image.
    """
    sides = [-(-image_size // 8)]
    while sides[-1] > 1:
        side = sides[-1]
        sides.append(-(-side // 2) if is_halved(side) else side - 2)
    maps = len(sides)
    # SSD300's steps are those of 304 px, though some of its maps are a little larger.
    steps = (8.0, 16.0, 32.0, 64.0, 100.0, 300.0) if image_size == 300 else (image_size / s for s in sides)
    apart = (_BEYOND - _SECOND) / max(1, maps - 1)
    sizes = [_SMALLEST, *(_SECOND + number * apart for number in range(maps))]
    return AnchorRule(
        image_size=image_size,
        sides=tuple(sides),
        steps=tuple(steps),
        sizes=tuple(round(size * image_size, 3) for size in sizes),
        ratios=tuple((2.0, 3.0) if 0 < number < maps - 2 else (2.0,) for number in range(maps)),
    )


SSD300 = anchor_rule(300)


class Anchors(NamedTuple):
    """The anchors of an image in two forms, fp32 fractions of the image."""

    centres: Tensor  # (anchors, 4) centre x, centre y, width, height, within [0, 1]
    corners: Tensor  # (anchors, 4) left, top, right, bottom, of which some are outside the image


class BoxTargets(NamedTuple):
    """What a batch of ground-truth boxes asks of each anchor."""

    classes: Tensor  # (batch, anchors) int64; 0: background
    boxes: Tensor  # (batch, anchors, 4) fp32, encoded; 0 for background


def build_anchors(rule: AnchorRule, device: torch.device | None = None) -> Anchors:
    rows = [
        ((column + 0.5) * step, (row + 0.5) * step, width, height)
        for number, (side, step) in enumerate(zip(rule.sides, rule.steps, strict=True))
        for width, height in _shapes(rule, number)
        for row in range(side)
        for column in range(side)
    ]
    centres = (torch.tensor(rows, dtype=torch.float64) / rule.image_size).clamp_(0, 1)
    return Anchors(centres.float().to(device), _corners(centres).float().to(device))


def _shapes(rule: AnchorRule, number: int) -> Iterator[tuple[float, float]]:
    """Yield width and height of the anchors at each position of a map."""
    size, following = rule.sizes[number], rule.sizes[number + 1]
    yield size, size
    yield sqrt(size * following), sqrt(size * following)
    for ratio in rule.ratios[number]:
        yield size * sqrt(ratio), size / sqrt(ratio)
        yield size / sqrt(ratio), size * sqrt(ratio)


def encode(boxes: Tensor, classes: Tensor, anchors: Anchors) -> BoxTargets:
    """Return the targets of ground-truth boxes (batch, most, 4) with classes (batch, most).

    An anchor gets the box that overlaps it most, if their IoU exceeds the criterion or it is that box's best
    anchor. If several anchors or boxes are equally good, the last one is taken, as DALI's box_encoder does.
    A box without area is ignored like padding, because the logarithm of its size is infinite.
    """
    if not boxes.shape[1]:
        boxes, classes = F.pad(boxes, (0, 0, 0, 1)), F.pad(classes, (0, 1))
    images = rows_together(boxes.shape[1] * len(anchors.corners), boxes.device)
    blocks = zip(torch.split(boxes.float(), images), torch.split(classes.long(), images), strict=True)
    found = [_encode(*block, anchors) for block in blocks]
    return BoxTargets(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _encode(boxes: Tensor, classes: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    matches, positive = _match(boxes, classes, anchors.corners)
    matched = boxes.gather(1, matches.unsqueeze(2).expand(-1, -1, 4))  # (batch, anchors, 4)
    size = matched[..., 2:] - matched[..., :2]
    centre = (matched[..., :2] + matched[..., 2:]) / 2
    of_anchor = anchors.centres
    moved = (centre - of_anchor[:, :2]) / of_anchor[:, 2:] * _CENTRE_SCALE
    grown = (size / of_anchor[:, 2:]).log() * _SIZE_SCALE
    encoded = torch.cat([moved, grown], dim=2).where(positive.unsqueeze(2), 0.0)
    return classes.gather(1, matches).where(positive, 0), encoded


def _match(boxes: Tensor, classes: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each anchor's box, and whether the anchor is positive: (batch, anchors) both."""
    present = (classes > 0) & (boxes[..., 2:] > boxes[..., :2]).all(dim=2)  # (batch, boxes)
    # Reversed, because argmax and max take the first of equals.
    present = present.flip(1).unsqueeze(2)
    overlaps = intersection_over_union(boxes.flip(1), corners.flip(0))  # (batch, boxes, anchors)
    overlaps = overlaps.masked_fill_(~present, -1.0)
    best_anchors = overlaps.argmax(dim=2, keepdim=True)  # (batch, boxes, 1)
    # Above every IoU, so that no other box takes the best anchor of a box.
    overlaps.scatter_(2, best_anchors, torch.where(present, 2.0, -1.0))
    highest, matches = overlaps.max(dim=1)
    return (boxes.shape[1] - 1 - matches).flip(1), (highest > _CRITERION).flip(1)


def decode(values: Tensor, anchors: Anchors) -> Tensor:
    """Return the boxes that encoded values (batch, anchors, 4) mean; they may reach outside the image."""
    values = values.float()
    of_anchor = anchors.centres
    centre = values[..., :2] / _CENTRE_SCALE * of_anchor[:, 2:] + of_anchor[:, :2]
    size = (values[..., 2:] / _SIZE_SCALE).exp() * of_anchor[:, 2:]
    return _corners(torch.cat([centre, size], dim=-1))


def rows_together(overlaps: int, device: torch.device) -> int:
    """Return how many rows of so many overlaps each are computed together."""
    return max(1, (_BLOCK_ON_CPU if device.type == "cpu" else _BLOCK) // overlaps)


def intersection_over_union(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU of each of n boxes (..., n, 4) with each of m boxes (..., m, 4): (..., n, m)."""
    left, top, right, bottom = first.unsqueeze(-2).unbind(-1)  # (..., n, 1) each
    other_left, other_top, other_right, other_bottom = second.unsqueeze(-3).unbind(-1)  # (..., 1, m) each
    width = (torch.minimum(right, other_right) - torch.maximum(left, other_left)).clamp_(min=0)
    height = (torch.minimum(bottom, other_bottom) - torch.maximum(top, other_top)).clamp_(min=0)
    intersection = width.mul_(height)
    areas = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
    # Two boxes without area have none in common; the limit avoids 0 / 0.
    return intersection / (areas - intersection).clamp_(min=torch.finfo(areas.dtype).tiny)


def _corners(centres: Tensor) -> Tensor:
    """Return left, top, right, bottom of boxes (..., 4) given as centre x, centre y, width, height."""
    half = centres[..., 2:] / 2
    return torch.cat([centres[..., :2] - half, centres[..., :2] + half], dim=-1)


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
