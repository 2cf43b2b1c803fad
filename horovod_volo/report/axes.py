"""Axes of charts: their range, round ticks, and how ticks are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUND = (1.0, 2.0, 5.0, 10.0)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is: 0 at the low end of the axis, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """Return the text of each tick."""
        if self.is_log or max(map(abs, self.ticks)) < 1e-3:
            return [short(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(self.ticks[0]) or 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{tick + 0.0:,.{decimals}f}" for tick in self.ticks]


def linear_axis(
    values: Sequence[float], ticks: int, *, from_zero: bool = False, tight: bool = False, whole: bool = False
) -> Axis:
    """Return an axis over values with about so many ticks.

    `tight` ends it at the values, not at ticks; the ticks of a `whole` one are whole numbers.
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        spread = abs(high) / 2 or 0.5
        low, high = low - spread * (not from_zero), high + spread
    step = max(_round_step((high - low) / ticks), float(whole))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    multiples = tuple(float(f"{number * step:.12g}") for number in range(first, last + 1))
    return Axis(low, high, multiples) if tight else Axis(multiples[0], multiples[-1], multiples)


def log_axis(values: Sequence[float], ticks: int) -> Axis:
    """Return a logarithmic axis over positive values: ticks at powers of ten, and between few of them."""
    first = math.floor(math.log10(min(values)) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(max(values)) - 1e-9))
    every = -(-(last - first) // max(1, ticks))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    powers = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    powers = [power for power in powers if power <= 10.0**last * (1 + 1e-9)]
    low = max(power for power in powers if power <= min(values) * (1 + 1e-9))
    high = next((power for power in powers if power >= max(values) * (1 - 1e-9) and power > low), 10.0**last)
    return Axis(low, high, tuple(power for power in powers if low <= power <= high), is_log=True)


def _round_step(step: float) -> float:
    """Return the round number that is nearest by ratio."""
    unit = 10.0 ** math.floor(math.log10(step))
    return min((factor * unit for factor in _ROUND), key=lambda rounded: abs(math.log(rounded / step)))


def short(value: float) -> str:
    """Write a number with few digits: a power of ten where it is small or large."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.6g}"
    mantissa, power = f"{value:.2e}".split("e")
    exponent = str(int(power)).translate(_SUPERSCRIPTS)
    rounded = f"{float(mantissa):g}"
    return f"10{exponent}" if rounded == "1" else f"{rounded}·10{exponent}"
