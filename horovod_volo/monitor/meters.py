"""Sums between two log points, kept on the device until somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class LossMeter:
    """Losses, time and waiting since the last log point. Adding to it never waits for the device."""

    def __init__(
        self, names: tuple[str, ...], device: torch.device, waited_seconds: Callable[[], float]
    ) -> None:
        self._names = names
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._waited_seconds = waited_seconds
        self.open()

    def open(self) -> None:
        """Begin anew."""
        self._sums.zero_()
        self.passes = 0
        self._began = time.monotonic()
        self._waited_before = self._waited_seconds()

    def add(self, values: tuple[Tensor, ...]) -> None:
        """Add one pass's values."""
        self._sums += torch.stack([value.detach() for value in values]).to(self._sums.dtype)
        self.passes += 1

    def sums(self) -> dict[str, float]:
        """Return the sums by name. Waits for the device."""
        return dict(zip(self._names, self._sums.tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Time since the window opened."""
        return time.monotonic() - self._began

    @property
    def waited(self) -> float:
        """Seconds of it spent waiting for data."""
        return self._waited_seconds() - self._waited_before
