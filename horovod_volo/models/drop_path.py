"""Drop path (stochastic depth) that computes a residual branch only for the images that keep it.

As in the usual form, which computes every branch and multiplies dropped ones by zero, each image keeps a
branch with probability 1 - rate, and a kept branch is divided by this probability. The number of images that
keep it is the expected one, rounded up or down at random, so that all ranks have equal work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.core.rng import generator
from horovod_volo.kernels import runs_kernels

Branch = Callable[[Tensor], Tensor]
# On a GPU, branches with lower rates are computed for all images: gathering the images that keep them would
# cost more (`bench roofline`), and shapes stay the same from step to step.
_MASKED_BELOW = 0.25


@dataclass(frozen=True, eq=False)
class DropPathSample:
    """The images of a batch that keep a branch, and the scale of the branch.

    The branch is computed for the images in `rows`; with `masked` for all, and -1 marks one that drops it.
    """

    rows: Tensor | None = None  # (computed,) int64; None: all images keep the branch
    scale: float = 1.0
    masked: bool = False
    position: Tensor | None = None  # (batch,) int64 index of each image in `rows`, -1 if dropped; for kernels

    def added(self, tokens: Tensor, branch: Branch, weight: float = 1.0) -> Tensor:
        """Return tokens (batch, ..., channels) with the weighted branch added for the images that keep it."""
        if self.rows is None:
            return torch.add(tokens, branch(tokens), alpha=weight * self.scale)
        if self.masked:
            result = branch(tokens)
            keeps = (self.rows >= 0).to(result.dtype).view(-1, *[1] * (tokens.ndim - 1))
            return torch.add(tokens, result * keeps, alpha=weight * self.scale)
        if not len(self.rows):
            return tokens
        result = branch(tokens.index_select(0, self.rows))
        return tokens.index_add(0, self.rows, result.to(tokens.dtype), alpha=weight * self.scale)


ALL = DropPathSample()


def sample_drop_path(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
    """Sample the images of a batch that keep each branch; `rates` are the drop rates of the branches.

    `seed` is 64 random bits for this micro-batch; it may be None if all rates are 0. Sampling is on the host:
    the result is the same for every device, and the host knows the shapes without waiting for the device.
    """
    if not any(rates):
        return [ALL] * len(rates)
    if seed is None:
        raise ValueError("drop path needs a seed in training")
    batch, device = len(tokens), tokens.device
    random = generator(seed)
    keep_rates = 1.0 - np.asarray(rates)
    counts = np.floor(batch * keep_rates + random.random(len(rates))).astype(
        np.int64
    )  # mean: batch x keep rate
    orders = random.permuted(np.tile(np.arange(batch), (len(rates), 1)), axis=1)  # (branches, batch)
    if not runs_kernels(tokens):
        return [
            DropPathSample(None if count == batch else row[:count], 1.0 / keep_rate)
            for count, keep_rate, row in zip(
                counts.tolist(), keep_rates.tolist(), copy_async(orders, device), strict=True
            )
        ]
    masked = np.asarray(rates) < _MASKED_BELOW
    maps = np.full((2, len(rates), batch), -1)  # rows and positions
    for branch, count in enumerate(counts.tolist()):
        kept = orders[branch, :count]
        maps[0, branch, kept if masked[branch] else np.arange(count)] = kept
        maps[1, branch, kept] = kept if masked[branch] else np.arange(count)
    rows, positions = copy_async(maps, device)  # one copy for all branches
    return [
        DropPathSample(row if is_masked else row[:count], 1.0 / keep_rate, is_masked, position)
        if count < batch
        else DropPathSample(scale=1.0 / keep_rate)
        for count, keep_rate, is_masked, row, position in zip(
            counts.tolist(), keep_rates.tolist(), masked.tolist(), rows, positions, strict=True
        )
    ]
