"""Soft targets from label maps, cropped like the image.

A label map holds a teacher's top-k classes and logits for each cell of an image, or of its centre crop,
beyond which a training crop may reach. The published target averages the logits over the crop with
RoIAlign, where classes outside a cell's top k have logit 0, and takes the softmax over all classes. Almost
all logits are 0, so this softmax is "uniform plus a few classes".

Invariant: the cost depends on k and the number of cells that a target averages, not on the number of classes.
The k ids of a cell are distinct.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from horovod_volo.objective.roi_weights import RoiWeights, roi_weights
from horovod_volo.objective.soft_target import SoftTarget, joined

Geometry = Literal["corrected", "reference"]

_BLOCK = 1 << 17  # entries processed together on a CPU, 8 bytes each


def map_target(
    scores: Tensor,
    ids: Tensor,
    boxes: Tensor,
    *,
    side: int,
    num_classes: int,
    geometry: Geometry,
    reach: float = 1.0,
) -> SoftTarget:
    """Return the targets of a side x side grid over each crop: batch x side x side rows, row-major.

    `scores` (logits) and `ids` are (batch, k, height, width), already flipped like the image;
    `boxes` (batch, 4) are top, left, height, width as fractions of that flipped map; no height or width
    exceeds `reach`. The ids of a row's entries are distinct and ascend; unused entries, of weight and id 0,
    follow.
    """
    (target,) = map_targets(
        scores, ids, boxes, sides=(side,), num_classes=num_classes, geometry=geometry, reach=reach
    )
    return target


def map_targets(
    scores: Tensor,
    ids: Tensor,
    boxes: Tensor,
    *,
    sides: tuple[int, ...],
    num_classes: int,
    geometry: Geometry,
    reach: float = 1.0,
) -> list[SoftTarget]:
    """Return the `map_target` of several grids over the same crops."""
    height, width = scores.shape[2:]
    cells = _Cells(_by_cell(scores).float(), _by_cell(ids).long().bitwise_left_shift_(32))
    targets = []
    for side in sides:
        rows, columns = _axis_weights(boxes, height, width, side, geometry, reach)
        # Nested, so that each intermediate result is freed once the next step has read it.
        parts = [
            _softmax(*_merged(*_entries(cells, *_near(images, height, width, rows, columns))), num_classes)
            for images in _blocks(rows, columns, scores.shape[1])
        ]
        targets.append(joined(parts))
    return targets


def most_probable(target: SoftTarget) -> Tensor:
    """Return the most probable class of each row of a `map_target`, (rows,); of equal ones, the lowest id.

    It is the same for the smoothed target.
    """
    best_weight, best_entry = target.weights.max(dim=1)
    best_id = target.ids.gather(1, best_entry.unsqueeze(1)).squeeze(1)
    # Without a positive entry, all classes without a negative entry are equally probable: find the lowest.
    # Ids ascend, so while the negative entries are classes 0, 1, 2, ... each id equals its rank among them.
    negative = target.weights < 0
    rank = negative.cumsum(dim=1) - 1
    first_not_negative = (negative & (target.ids == rank)).sum(dim=1)
    return torch.where(best_weight > 0, best_id, first_not_negative)


def _axis_weights(
    boxes: Tensor, height: int, width: int, side: int, geometry: Geometry, reach: float
) -> tuple[RoiWeights, RoiWeights]:
    top, left, tall, wide = boxes.unbind(dim=1)
    starts, extents, scales = (top, left), (tall, wide), (height, width)
    if geometry == "reference":
        # The published code passes (top, left, bottom, right) to RoIAlign as (x1, y1, x2, y2), all
        # multiplied by the map's width.
        starts, extents, scales = (left, top), (wide, tall), (width, width)
    of_axis = partial(roi_weights, side=side, reach=reach)
    if height != width:
        return (
            of_axis(starts[0], extents[0], size=height, scale=scales[0]),
            of_axis(starts[1], extents[1], size=width, scale=scales[1]),
        )
    # Both axes of a square map in one call: for so few numbers the cost is that of the calls.
    cells, weights = of_axis(torch.cat(starts), torch.cat(extents), size=width, scale=width)
    batch = len(boxes)
    return RoiWeights(cells[:batch], weights[:batch]), RoiWeights(cells[batch:], weights[batch:])


class _Cells(NamedTuple):
    """Label maps with one row per cell, for gathering."""

    scores: Tensor  # (batch x height x width, k) fp32
    keys: Tensor  # same shape, int64: the id in the upper 32 bits, the lower ones free for a logit


def _by_cell(maps: Tensor) -> Tensor:
    """Return (batch, k, height, width) as contiguous (batch x height x width, k)."""
    return maps.permute(0, 2, 3, 1).contiguous().flatten(0, 2)


def _blocks(rows: RoiWeights, columns: RoiWeights, k: int) -> Iterator[slice]:
    """Yield slices of images whose entries fit a CPU's cache; on a GPU, the entire batch."""
    batch, side, length = rows.cells.shape
    entries = side * columns.cells.shape[1] * length * columns.cells.shape[2] * k  # per image
    images = max(1, _BLOCK // entries) if rows.cells.device.type == "cpu" else batch
    return (slice(first, min(first + images, batch)) for first in range(0, batch, images))


def _near(
    images: slice, height: int, width: int, rows: RoiWeights, columns: RoiWeights
) -> tuple[Tensor, Tensor]:
    """Return the map cells that each target of these images averages, and their weights: (targets, cells)."""
    first = torch.arange(images.start, images.stop, device=rows.cells.device).mul_(height * width)
    begin = first.view(-1, 1, 1) + rows.cells[images] * width  # (images, side, length)
    near = begin[:, :, None, :, None] + columns.cells[images][:, None, :, None]
    weights = rows.weights[images][:, :, None, :, None] * columns.weights[images][:, None, :, None]
    return near.flatten(0, 2).flatten(1), weights.flatten(0, 2).flatten(1)


def _entries(cells: _Cells, near: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's ids, ascending, and their weighted logits: both (targets, entries)."""
    targets, near = len(near), near.flatten()
    logits = cells.scores.index_select(0, near).mul_(weights.view(-1, 1))
    # One sort of integers brings equal ids together, each with its logit in the lower bits.
    keys = cells.keys.index_select(0, near).add_(logits.view(torch.uint32).long())
    keys = _rows_sorted(keys.view(targets, -1))
    logits = keys.int().view(torch.float32)
    return keys.bitwise_right_shift_(32).int(), logits


def _rows_sorted(keys: Tensor) -> Tensor:
    """Return each row sorted; on a CPU, in place."""
    if keys.device.type == "cpu":
        keys.numpy().sort(axis=1)  # vectorized: torch's sort takes seven times as long
        return keys
    return keys.sort(dim=1).values


def _merged(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the logits of equal ids, sorted in each row; return distinct ids, sums and their count."""
    place = torch.zeros_like(ids, dtype=torch.int64)  # index of each entry's id among the distinct ones
    torch.cumsum(ids[:, 1:] != ids[:, :-1], dim=1, out=place[:, 1:])
    sums = torch.zeros_like(logits).scatter_add_(1, place, logits)
    return torch.zeros_like(ids).scatter_(1, place, ids), sums, place[:, -1:] + 1


def _softmax(ids: Tensor, logits: Tensor, distinct: Tensor, num_classes: int) -> SoftTarget:
    """Take the softmax over all classes, of logits that are 0 except at each row's first `distinct` ids.

    With Z = (classes - distinct) + sum e^z: every class has 1 / Z, an entry (e^z - 1) / Z more.
    The uniform part of a row that has an entry for every class is 0. `logits` is overwritten.
    """
    absent = num_classes - distinct  # (rows, 1) classes without an entry
    # An entry of logit 0 is equivalent to an absent class, and so is an unused entry, whose sum is 0.
    used = logits.sign().abs_()
    if num_classes <= ids.shape[1]:  # a row may have an entry for every class, and then none is absent
        used = (torch.arange(ids.shape[1], device=ids.device) < distinct).float()
        logits = logits.masked_fill_(used == 0, -torch.inf)
    # All terms are divided by e^highest, so that none overflows and their sum does not underflow.
    highest = logits.amax(dim=1, keepdim=True)  # (rows, 1)
    highest = torch.where(absent > 0, highest.clamp(min=0.0), highest)
    other = torch.where(absent > 0, (-highest).exp(), 0.0)  # (rows, 1) an absent class's term
    extra = logits.sub_(highest).exp_().sub_(other).mul_(used)  # (rows, entries) beyond an absent class's
    total = num_classes * other + extra.sum(dim=1, keepdim=True)  # (rows, 1)
    return SoftTarget((other / total).squeeze(1), ids.long(), extra.div_(total))
