"""Counts the steps that made no update, without looking at the device between log points.

With fp16, the gradient scaler skips a step whose gradients overflowed, and does not say so. How often it did
follows from its state: it multiplies the scale by one factor after each overflow, and by another one after
enough steps in a row without.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch


class SkippedSteps:
    """The number of steps without an update since the start of a run."""

    def __init__(self, scaler: torch.amp.GradScaler, total: int = 0) -> None:
        self.total = total
        self._scaler = scaler
        self.restart()

    @property
    def overflowing(self) -> bool:
        """Return whether gradients have overflowed at any loss scale down to 1. Waits for the device."""
        return self._scaler.is_enabled() and self._scaler.get_scale() < 1

    def restart(self) -> None:
        """Note that the scaler's state was replaced."""
        self._before = self._scaler.state_dict()

    def add_not_finite(self) -> None:
        """Count a step whose loss is not finite; a scaler counts it itself."""
        if not self._scaler.is_enabled():
            self.total += 1

    def count(self, steps: int) -> int:
        """Count and return those of the last `steps` steps that the scaler skipped. Waits for the device."""
        before, self._before = self._before, self._scaler.state_dict()
        skipped = overflows(before, self._before, steps)
        self.total += skipped
        return skipped


def overflows(before: Mapping[str, Any], after: Mapping[str, Any], steps: int) -> int:
    """Return how many of `steps` steps overflowed, given the states of a scaler; {} is one that is off.

    Where the scale grew and shrank in the same steps, the least number is returned that explains the state.
    """
    if not after:
        return 0
    # Half of the least number of fp32, 2^-149, is rounded to 0.
    ratio = math.log(max(after["scale"], 2.0**-150) / before["scale"])
    growth, backoff = math.log(after["growth_factor"]), math.log(after["backoff_factor"])
    interval = after["growth_interval"]
    for grown in range(steps // interval + 2):
        shrunk = round((ratio - grown * growth) / backoff)
        counts_on = before["_growth_tracker"] + steps - grown * interval == after["_growth_tracker"]
        if shrunk > 0 or (shrunk == 0 and counts_on):
            return min(shrunk, steps)
    return 0
