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


@dataclass(frozen=True, eq=False)
class DropPathSample:
    """The images of a batch that keep a branch, and the scale of the branch.

    The branch is computed for the images in `rows`, or for all and masked.
    """

    rows: Tensor | None = None  # (kept,) int64; None: all images
    scale: float = 1.0
    mask: Tensor | None = None  # (batch,) float32: 1 for images that keep the branch, else 0
    factors: Tensor | None = None  # (batch,) float32: the mask times the scale

    def added(self, tokens: Tensor, branch: Branch, weight: float = 1.0) -> Tensor:
        """Return tokens (batch, ..., channels) with the weighted branch added for the images that keep it."""
        if self.rows is None:
            return self._added_to_all(tokens, branch(tokens), weight)
        if not len(self.rows):
            return tokens
        result = branch(tokens.index_select(0, self.rows))
        return tokens.index_add(0, self.rows, result.to(tokens.dtype), alpha=weight * self.scale)

    def _added_to_all(self, tokens: Tensor, result: Tensor, weight: float) -> Tensor:
        if self.mask is None or self.factors is None:
            return torch.add(tokens, result, alpha=weight * self.scale)
        of_images = (-1, *[1] * (tokens.ndim - 1))
        if torch.compiler.is_compiling():  # the scale of each block would be a constant of its own graph
            factors = self.factors.view(of_images)  # bf16 would round them
            return torch.addcmul(tokens, result, factors, value=weight).to(tokens.dtype)
        mask = self.mask.to(tokens.dtype).view(of_images)
        return torch.addcmul(tokens, result, mask, value=weight * self.scale)


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
    # On average batch x keep rate.
    counts = np.floor(batch * keep_rates + random.random(len(rates))).astype(np.int64)
    orders = random.permuted(np.tile(np.arange(batch), (len(rates), 1)), axis=1)  # (branches, batch)
    scales = 1.0 / keep_rates
    is_masked = np.asarray(rates) < _masked_below(device)
    masks = np.argsort(orders[is_masked], axis=1) < counts[is_masked, None]  # (masked branches, batch)
    factors = np.stack([masks, scales[is_masked, None] * masks], axis=1).astype(np.float32)
    of_masked = iter(copy_async(factors, device))
    return [
        DropPathSample(None, scale, *next(of_masked))
        if masked
        else DropPathSample(None if count == batch else row[:count], scale)
        for masked, count, scale, row in zip(
            is_masked.tolist(), counts.tolist(), scales.tolist(), copy_async(orders, device), strict=True
        )
    ]


def _masked_below(device: torch.device) -> float:
    """Return the rate below which branches are computed for all images.

    On a GPU, gathering the images that keep them would cost more (`bench roofline`), and shapes stay the same
    from step to step.
    """
    return 0.0 if device.type == "cpu" else 0.25
