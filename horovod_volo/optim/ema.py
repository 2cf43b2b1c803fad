"""Weights averaged over steps, kept beside the raw ones in the same flat layout."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Return the decay of a step: short memory at first, so that the fresh weights are soon forgotten."""
    return min(decay, (1 + step) / (10 + step))


class Average(Protocol):
    """Averaged weights, or none."""

    def update(self, step: int) -> None:
        """Take in the model's weights after `step`."""

    def models(self) -> dict[str, nn.Module]:
        """Name the averaged models to evaluate: one or none."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors to store and restore."""


class Flat(Protocol):
    """Some parameters in one flat tensor."""

    weights: Tensor  # all of them; it stays the same tensor
    parameters: dict[str, nn.Parameter]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's place in a flat tensor of the same layout."""


class Ema:
    """An exponential moving average of a model's parameters, which lie in `flats`; buffers are copied."""

    def __init__(self, model: nn.Module, flats: Iterable[Flat], decay: float) -> None:
        self._decay = decay
        self._average = copy.deepcopy(model).eval().requires_grad_(False)
        own = dict(self._average.named_parameters())
        sources = list(flats)
        self._sources = [flat.weights for flat in sources]
        self._averages = [flat.weights.clone() for flat in sources]
        for flat, average in zip(sources, self._averages, strict=True):
            for name in flat.parameters:
                own[name].data = flat.view(average, name)
        # Listed once: to find them among hundreds of modules takes longer than to copy them.
        self._buffers = list(zip(self._average.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        torch._foreach_lerp_(self._averages, self._sources, 1.0 - decay_at(step, self._decay))
        for average, source in self._buffers:
            average.copy_(source)

    def models(self) -> dict[str, nn.Module]:
        return {"ema": self._average}

    def tensors(self) -> dict[str, Tensor]:
        return self._average.state_dict()


class NoAverage:
    """No averaged weights."""

    def update(self, step: int) -> None:
        pass

    def models(self) -> dict[str, nn.Module]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}
