"""Losses, time and data wait between two log points, accumulated without synchronising with the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class LossMeter:
    """Sums of losses in fp64 on the device, and timers, since the last reset.

    Micro-batches with a loss that is not finite are left out; `finite` among the sums counts the others.
    `waited_seconds` returns how long the run has waited for data since it started.
    """

    def __init__(
        self, names: tuple[str, ...], device: torch.device, waited_seconds: Callable[[], float]
    ) -> None:
        self._names = (*names, "finite")
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        self._waited_seconds = waited_seconds
        self.reset()

    def reset(self) -> None:
        """Set sums and timers to zero."""
        self._sums.zero_()
        self.micro_batches = 0
        self._start_time = time.monotonic()
        self._waited_at_reset = self._waited_seconds()

    def add(self, values: Iterable[Tensor]) -> None:
        """Add the losses of one micro-batch. Does not synchronise with the device."""
        losses = torch.stack([*(value.detach() for value in values), self._one]).to(self._sums.dtype)
        self._sums += torch.where(losses.isfinite().all(), losses, 0.0)
        self.micro_batches += 1

    def sums(self) -> dict[str, float]:
        """Return the sums by name. Synchronises with the device."""
        return dict(zip(self._names, self._sums.tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Return the seconds since the last reset."""
        return time.monotonic() - self._start_time

    @property
    def data_wait_seconds(self) -> float:
        """Return the seconds since the last reset that were spent waiting for data."""
        return self._waited_seconds() - self._waited_at_reset
