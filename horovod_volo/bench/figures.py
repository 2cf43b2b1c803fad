"""Line charts as SVG, with no dependency: what docs/figures holds.

Lines are told apart by dashes and by a label at their end, not by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 50, 60
_COLOURS = ("#0b5fa5", "#c1440e", "#2a7a3b", "#7a3b8f", "#555555", "#a07800")
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
_LABEL_HEIGHT = 15


@dataclass(frozen=True)
class Line:
    """One line: its name, and its points (x, y) from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart whose x runs by doublings, as numbers of ranks do."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    y_low: float
    y_high: float

    def write(self, file: Path) -> None:
        """Write it as SVG."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.svg(), encoding="utf-8")

    def svg(self) -> str:
        """Draw it."""
        places = sorted({x for line in self.lines for x, _ in line.points})
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            _text(_LEFT, 26, self.title, "start", 'font-size="15"'),
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, self.x, "middle"),
            _text(_LEFT, _TOP - 8, self.y, "start"),
        ]
        for tick in _ticks(self.y_low, self.y_high):
            y = self._y(tick)
            parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
            parts.append(_text(_LEFT - 8, y + 4, f"{tick:,g}", "end"))
        for place in places:
            x = self._x(place, places)
            parts.append(_rule(x, _TOP, x, _HEIGHT - _BOTTOM))
            parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{place:,g}", "middle"))
        ends = _apart([self._y(line.points[-1][1]) for line in self.lines])
        for number, (line, end) in enumerate(zip(self.lines, ends, strict=True)):
            parts += self._drawn(number, line, end, places)
        return "\n".join([*parts, "</svg>", ""])

    def _drawn(self, number: int, line: Line, end: float, places: Sequence[float]) -> list[str]:
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        spots = [(self._x(x, places), self._y(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"'
        return [
            f'{drawn} stroke-dasharray="{dash}"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots),
            _text(spots[-1][0] + 9, end + 4, line.name, "start", f'fill="{colour}"'),
        ]

    def _x(self, value: float, places: Sequence[float]) -> float:
        span = math.log(places[-1] / places[0]) or 1.0
        return _LEFT + 14 + (_WIDTH - _RIGHT - _LEFT - 28) * math.log(value / places[0]) / span

    def _y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share


def _apart(wanted: Sequence[float]) -> list[float]:
    """Move labels down until none covers another."""
    placed = list(wanted)
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + _LABEL_HEIGHT)
    return placed


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
