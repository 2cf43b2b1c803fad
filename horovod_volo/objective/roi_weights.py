"""Which cells of a map an output cell averages along one axis, and with which weights.

RoIAlign samples bilinearly on a regular grid and averages; rows and columns factor, so one set of
weights per axis says it all. An output cell touches only a short run of neighbouring map cells, its
window, whose length is known from the map's size and the largest extent of the boxes, which the host
knows: nothing waits for the device.

A box may reach beyond its map, where the teacher has said nothing. There the nearest cell is read. RoIAlign
reads 0 from one cell beyond the map on, that is, every class alike; but what lies beside a map belongs to
the same image and most often to what its edge shows. For a box on its map RoIAlign's rule is kept: it only
matters to boxes smaller than a cell, which are stretched to one and may leave the map so.

Invariant: positions follow torchvision.ops.roi_align (aligned=False, sampling_ratio=-1) operation
by operation in fp32. The number of samples jumps at whole numbers, so an equal formula in another
order may round to another number.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-5  # of a box that ends with its map


class RoiWeights(NamedTuple):
    """For every output cell along one axis, the map cells it averages."""

    cells: Tensor  # (batch, side, length) int64, all inside the map
    weights: Tensor  # (batch, side, length) fp32; their sum is 1 unless samples fall off the map


def roi_weights(
    start: Tensor, extent: Tensor, *, side: int, size: int, scale: int, reach: float = 1.0
) -> RoiWeights:
    """Cut boxes into `side` equal bins and find each bin's window on an axis of `size` cells.

    `start` and `extent`, (batch,), are fractions of what the map covers, which spans `scale` cells; no
    extent exceeds `reach`.
    """
    start, extent = start.float().view(-1, 1, 1), extent.float().view(-1, 1, 1)  # (batch, 1, 1)
    low = start * scale - 0.5  # in cells, of which 0 is the first one's centre
    high = (start + extent) * scale - 0.5
    bin_size = (high - low).clamp_(min=1.0) / side
    widest = scale * reach / side
    most_samples = ceil(widest)
    # The largest box may round to slightly more than its cells: that is no further sample.
    samples = bin_size.ceil().clamp_(max=most_samples)  # (batch, 1, 1) one per cell begun

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
