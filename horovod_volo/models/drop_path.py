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

Branch = Callable[[Tensor], Tensor]
# On a GPU, branches with lower rates are computed for all images: gathering the images that keep them would
# cost more (`bench roofline`), and shapes stay the same from step to step.
_MASKED_BELOW = 0.25


@dataclass(frozen=True, eq=False)
class DropPathSample:
    """The images of a batch that keep a branch, and the scale of the branch.

    The branch is computed for the images in `rows`, or for all and multiplied by `keeps`.
    """

    rows: Tensor | None = None  # (kept,) int64; None: all images
    scale: float = 1.0
    keeps: Tensor | None = None  # (batch,) float32: 1 for images that keep the branch, 0 for others

    def added(self, tokens: Tensor, branch: Branch, weight: float = 1.0) -> Tensor:
        """Return tokens (batch, ..., channels) with the weighted branch added for the images that keep it."""
        factor = weight * self.scale
        if self.rows is None:
            result = branch(tokens)
            if self.keeps is not None:
                result = result * self.keeps.to(result.dtype).view(-1, *[1] * (tokens.ndim - 1))
            return torch.add(tokens, result, alpha=factor)
        if not len(self.rows):
            return tokens
        result = branch(tokens.index_select(0, self.rows))
        return tokens.index_add(0, self.rows, result.to(tokens.dtype), alpha=factor)


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
    places = np.argsort(orders, axis=1)
    keeps = copy_async((places < counts[:, None]).astype(np.float32), device)
    masked_below = 0.0 if device.type == "cpu" else _MASKED_BELOW
    return [
        DropPathSample(None, scale)
        if count == batch
        else DropPathSample(None, scale, keep)
        if rate < masked_below
        else DropPathSample(row[:count], scale)
        for rate, count, scale, row, keep in zip(
            rates, counts.tolist(), (1.0 / keep_rates).tolist(), copy_async(orders, device), keeps, strict=True
        )
    ]
