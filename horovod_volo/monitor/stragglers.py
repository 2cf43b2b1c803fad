"""Finds the rank that the others wait for, from the time that each rank takes for its own part of a step.

That is from the start of a step to the end of backward on its device, without waiting for other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import torch

_LEAST_FRACTION, _LEAST_SECONDS = 0.1, 0.005  # by which a straggler is slower than the others


class OwnTime(NamedTuple):
    """Seconds of one rank, on average over steps."""

    seconds: float = 0.0  # of its own part of a step
    data: float = 0.0  # of them, waiting for data


class StepTimer:
    """Measures a rank's own part of its steps. Does not synchronise with the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._seconds, self._steps = 0.0, 0
        self._exchange_seconds, self._ended = 0.0, time.monotonic()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._exchanges: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()
        if self._is_cuda:
            self._first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._first.record()

    def end(self) -> None:
        """Note that the backward of the step, and the wait for its data, are over."""
        self._steps += 1
        self._ended = time.monotonic()
        self._seconds += self._ended - self._began
        if self._is_cuda:
            self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._last.record()
            self._events.append((self._first, self._last))

    def exchanged(self) -> None:
        """Note that the gradients of the step are averaged over ranks."""
        self._exchange_seconds += time.monotonic() - self._ended
        if self._is_cuda:
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after.record()
            self._exchanges.append((self._last, after))

    def seconds_per_step(self) -> float:
        """Return the mean time of a step: the host's or the device's, whichever is longer.

        Waits for the device.
        """
        return max(self._seconds, _elapsed_seconds(self._events)) / max(self._steps, 1)

    def exchange_seconds(self) -> float:
        """Return for how long steps waited for other ranks after their own part: on a GPU, the device.

        Waits for the device.
        """
        return _elapsed_seconds(self._exchanges) if self._is_cuda else self._exchange_seconds


def _elapsed_seconds(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    total = 0.0
    for first, last in pairs:
        last.synchronize()
        total += first.elapsed_time(last) / 1e3
    return total


@dataclass
class StragglerFinder:
    """Names a rank that is slower than the others at two log points in a row, once."""

    hosts: Sequence[str]  # by rank
    _last: int | None = None
    _named: int | None = None

    def find(self, times: Sequence[OwnTime]) -> str | None:
        """Return a message if there is a new straggler, given the times of all ranks."""
        slowest = max(range(len(times)), key=lambda rank: times[rank].seconds)
        typical = median_low(own.seconds for own in times)
        excess = times[slowest].seconds - typical
        if excess < max(_LEAST_SECONDS, _LEAST_FRACTION * typical):
            self._last = self._named = None
            return None
        is_new = slowest == self._last and slowest != self._named
        self._last = slowest
        if not is_new:
            return None
        self._named = slowest
        own = times[slowest]
        return (
            f"warning: the other ranks wait for rank {slowest} on {self.hosts[slowest]}: it takes "
            f"{1e3 * own.seconds:.0f} ms for its part of a step, they take {1e3 * typical:.0f} ms; of its "
            f"time, {1e3 * own.data:.0f} ms are waiting for data"
        )
