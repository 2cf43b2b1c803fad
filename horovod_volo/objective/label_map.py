"""Soft targets from label maps, cropped like the image.

A label map holds a teacher's top-k classes and logits for each cell of an image, or of its centre crop,
beyond which a training crop may reach. The published target averages the logits over the crop with
RoIAlign, where classes outside a cell's top k have logit 0, and takes the softmax over all classes. Almost
all logits are 0, so this softmax is "uniform plus a few classes". RoIAlign averages bilinear samples on a
regular grid, which is separable, so weights per axis are sufficient. How many cells an output cell averages
follows from the size of the map and the largest extent of the boxes, which the host knows: nothing
synchronizes with the device.

A box may extend beyond its map, where there are no labels. There the nearest cell is read, because what is
beside the map most often belongs to the object at its edge. RoIAlign would read 0 for all classes, from
one cell beyond the map on. For boxes inside their map RoIAlign's rule is followed; it only matters for boxes
smaller than a cell, which are enlarged to one cell and may then exceed the map.

Invariants: the cost depends on k and the number of cells that a target averages, not on the number of
classes. The k ids of a cell are distinct. Positions follow torchvision.ops.roi_align (aligned=False,
sampling_ratio=-1) operation by operation in fp32: the number of samples is a rounded-up quotient, and the
same formula in another order could give another number.
"""

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from horovod_volo.objective.soft_target import SoftTarget, joined

Geometry = Literal["corrected", "reference"]

_ROUNDING = 1e-5  # of the end of a box that ends with its map
_BLOCK = 1 << 17  # entries processed together on a CPU, 8 bytes each


class RoiWeights(NamedTuple):
    """The map cells that each output cell averages along one axis."""

    cells: Tensor  # (batch, side, length) int64, all inside the map
    weights: Tensor  # (batch, side, length) fp32; their sum is 1 unless samples fall off the map


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
    """Return the targets of side x side grids over each crop: batch x side x side rows, row-major.

    `scores` (logits) and `ids` are (batch, k, height, width), already flipped like the image;
    `boxes` (batch, 4) are top, left, height, width as fractions of that flipped map; no height or width
    exceeds `reach`. The ids of a row's entries are distinct and ascend; unused entries, of weight and id 0,
    follow.
    """
    height, width = scores.shape[2:]
    # A row for each cell, to gather from. An id is in the upper half of its key, the lower is for a logit.
    cells = _by_cell(scores).float(), _by_cell(ids).long().bitwise_left_shift_(32)
    targets = []
    for side in sides:
        rows, columns = _axis_weights(boxes, height, width, side, geometry, reach)
        # Nested, so that each intermediate result is freed once the next step has read it.
        parts = [
            _softmax(*_merged(*_entries(*cells, *_near(images, height, width, rows, columns))), num_classes)
            for images in _blocks(rows, columns, scores.shape[1])
        ]
        targets.append(joined(parts))
    return targets


def most_probable(target: SoftTarget) -> Tensor:
    """Return the most probable class of each row of `map_targets`, (rows,); of equal ones, the lowest id.

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


def roi_weights(
    start: Tensor, extent: Tensor, *, side: int, size: int, scale: int, reach: float = 1.0
) -> RoiWeights:
    """Divide boxes into `side` equal bins; return the cells of each bin on an axis of `size` cells.

    `start` and `extent`, (batch,), are fractions of the map, which has `scale` cells; no extent exceeds
    `reach`.
    """
    start, extent = start.float().view(-1, 1, 1), extent.float().view(-1, 1, 1)  # (batch, 1, 1)
    low = start * scale - 0.5  # in cells; 0 is the centre of the first one
    high = (start + extent) * scale - 0.5
    bin_size = (high - low).clamp_(min=1.0) / side
    widest = scale * reach / side
    most_samples = ceil(widest)
    # Rounding may make the largest box slightly larger than its cells, which adds no sample.
    samples = bin_size.ceil().clamp_(max=most_samples)  # (batch, 1, 1) one per cell or part of a cell

    bins = torch.arange(side, device=start.device).unsqueeze(1)  # (side, 1)
    middle = torch.arange(0.5, most_samples, device=start.device)  # (most_samples,) sample + 0.5
    # (batch, side, most_samples)
    positions = low + bins * bin_size + middle * bin_size / samples
    beyond = (start < -_ROUNDING) | (start + extent > 1 + _ROUNDING)  # (batch, 1, 1)
    counted = (middle < samples) & (beyond | ((positions >= -1.0) & (positions <= size)))
    positions.clamp_(0, size - 1)

    # The first and last sample of a bin lie bin_size x (1 - 1 / samples) apart, and each of them
    # reads the cell below and the one above.
    length = min(size, ceil(widest * (1 - 1 / most_samples)) + 2)
    first = positions[..., :1].floor().clamp_(max=size - length)  # (batch, side, 1)
    cells = first + torch.arange(length, device=start.device)  # (batch, side, length)
    # Bilinear interpolation gives a cell 1 minus its distance from the sample.
    distance = (positions.unsqueeze(-1) - cells.unsqueeze(-2)).abs_()  # (batch, side, most_samples, length)
    tent = distance.neg_().add_(1.0).clamp_(min=0.0).mul_(counted.unsqueeze(-1))
    return RoiWeights(cells.long(), tent.sum(dim=2).div_(samples))


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


def _entries(cells: Tensor, keys: Tensor, near: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's ids, ascending, and their weighted logits: both (targets, entries)."""
    targets, near = len(near), near.flatten()
    logits = cells.index_select(0, near).mul_(weights.view(-1, 1))
    # One sort of integers brings equal ids together, each with its logit in the lower bits.
    keys = keys.index_select(0, near).add_(logits.view(torch.uint32).long())
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
