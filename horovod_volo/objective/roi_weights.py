"""RoIAlign along one axis: the map cells that each output cell averages, and their weights.

RoIAlign averages bilinear samples on a regular grid, which is separable, so weights per axis are
sufficient. An output cell averages a few consecutive map cells. How many follows from the size of the map and
the largest extent of the boxes, which the host knows, so nothing synchronizes with the device.

A box may extend beyond its map, where there are no labels. There the nearest cell is read, because what is
beside the map most often belongs to the object at its edge. RoIAlign would read 0 for all classes, from
one cell beyond the map on. For boxes inside their map RoIAlign's rule is followed; it only matters for boxes
smaller than a cell, which are enlarged to one cell and may then exceed the map.

Invariant: positions follow torchvision.ops.roi_align (aligned=False, sampling_ratio=-1) operation by
operation in fp32. The number of samples is a rounded-up quotient: the same formula in another order could
give another number.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-5  # of the end of a box that ends with its map


class RoiWeights(NamedTuple):
    """The map cells that each output cell averages along one axis."""

    cells: Tensor  # (batch, side, length) int64, all inside the map
    weights: Tensor  # (batch, side, length) fp32; their sum is 1 unless samples fall off the map


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
