"""Weights averaged over steps, kept beside the raw ones."""

from __future__ import annotations

import copy
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


class Ema:
    """An exponential moving average of a model's parameters; buffers are copied."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._source = model
        self._average = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, step: int) -> None:
        weight = 1.0 - decay_at(step, self._decay)
        averages: list[Tensor] = list(self._average.parameters())
        sources: list[Tensor] = list(self._source.parameters())
        torch._foreach_lerp_(averages, sources, weight)
        for average, source in zip(self._average.buffers(), self._source.buffers(), strict=True):
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
