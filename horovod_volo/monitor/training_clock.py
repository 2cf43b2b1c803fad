"""The hours that a run has been trained, and the part of its time that checkpoints take.

Hours are those of the wall clock, with evaluations and checkpoints, from the start of training on; a run that
resumes counts on from its last record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TrainingClock:
    """Measures the time of a run on one rank. Does not synchronise with the device."""

    def __init__(self, hours_before: float = 0.0) -> None:
        self._hours_before = hours_before
        self._start = time.monotonic()
        self._depth = 0
        self._checkpoints = 0.0  # seconds since the last log point
        self._before_epoch = 0.0  # of them, those before the epoch under way began

    @property
    def hours(self) -> float:
        """Return the hours of training since the start of the run."""
        return self._hours_before + (time.monotonic() - self._start) / 3600

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time inside as that of a checkpoint."""
        self._depth += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._checkpoints += time.monotonic() - began

    def begin_epoch(self) -> None:
        """Note that the time since the last log point, but for checkpoints, was not that of training."""
        self._before_epoch = self._checkpoints

    def take_checkpoint_seconds(self) -> tuple[float, float]:
        """Return the seconds of checkpoints since the last log point, and those before the epoch began."""
        taken = self._checkpoints, self._before_epoch
        self._checkpoints = self._before_epoch = 0.0
        return taken
