"""Averaged weights: the exponential moving average (EMA), in the same flat layout as the raw weights.

Invariant: without warm-up, parameters and batch norm statistics equal timm's ModelEmaV2 up to rounding.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """The averaged weights (EMA) of a run; this class itself is that of a run without any."""

    def update(self, step: int) -> None:
        """Update the average with the model's weights after `step`."""

    def models(self) -> dict[str, nn.Module]:
        """Return the averaged models to evaluate, by name: one or none."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; they are the live ones."""
        return {}


class Ema(Average):
    """The EMA of a model's parameters, which are views of `buckets`, and of its batch norm statistics."""

    def __init__(
        self, model: nn.Module, buckets: Sequence[Any], decay: float, *, warmup: bool = False
    ) -> None:
        self._decay = decay
        self._warmup = warmup
        self._average = copy.deepcopy(model).eval().requires_grad_(False)
        own = dict(self._average.named_parameters())
        self._sources = [bucket.weights for bucket in buckets]  # flat, never replaced
        self._averages = [weights.clone() for weights in self._sources]
        for bucket, average in zip(buckets, self._averages, strict=True):
            for name in bucket.parameters:
                own[name].data = bucket.view(average, name)
        # Listed once: finding them among hundreds of modules takes longer than averaging them.
        buffers = list(zip(self._average.buffers(), model.buffers(), strict=True))
        floating = [pair for pair in buffers if pair[0].is_floating_point()]
        self._averages += [average for average, _ in floating]
        self._sources += [source for _, source in floating]
        # Evaluation does not use num_batches_tracked: as in timm's ModelEmaV3, it is copied.
        self._counts = [pair for pair in buffers if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        # With warm-up the decay starts small, so that the initial weights fade soon.
        decay = min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay
        torch._foreach_lerp_(self._averages, self._sources, 1.0 - decay)
        for average, source in self._counts:
            average.copy_(source)

    def models(self) -> dict[str, nn.Module]:
        return {"ema": self._average}

    def tensors(self) -> dict[str, Tensor]:
        return self._average.state_dict()
