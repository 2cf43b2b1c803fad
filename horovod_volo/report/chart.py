"""A line chart as SVG, with the same points as a table for those who cannot see it.

Each chart is drawn twice, for wide and for narrow places, so that its text is of one size everywhere; the
style sheet shows one of the two. `page.js` reads the places of points from the paths, and what to say about
them from `data-points`, so both have the same points in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from horovod_volo.report.axes import Axis, linear_axis, log_axis
from horovod_volo.report.markup import Markup, element, folded, joined, table

Point = tuple[float, float]
Item = TypeVar("Item")

COLORS = 8  # in the style sheet; later curves are dashed
_MOST_POINTS, _MOST_ROWS = 240, 25
_LETTER, _LINE = 7.7, 16.0  # width of a letter and height of a line of text
_MARGIN_TOP, _MARGIN_BOTTOM = 12.0, 44.0
# Width, height, letters of a label, and ticks of the horizontal axis.
_DRAWINGS = {"wide": (540.0, 290.0, 19, 6), "narrow": (340.0, 260.0, 12, 4)}


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    label: str
    points: Sequence[Point]
    color: int = 0
    is_dashed: bool = False
    is_marked: bool = False  # each point has a dot
    raw: Sequence[Point] = ()  # the points before they were smoothed: a thin line behind


@dataclass(frozen=True)
class Chart:
    """What is drawn."""

    title: str
    unit: str  # of the vertical axis; empty: none
    across: str  # what the horizontal axis is
    curves: Sequence[Curve]
    written: Callable[[float], str]  # a value with its unit
    from_zero: bool = False
    is_log: bool = False
    note: str = ""
    is_whole: bool = False  # the horizontal axis counts something
    reference: Sequence[Curve] = ()  # drawn in grey, without a value at its end


@dataclass(frozen=True)
class Frame:
    """The size of a drawing and the place of its axes in it."""

    width: float
    height: float
    left: float  # margins
    right: float
    x: Axis
    y: Axis

    def place(self, point: Point) -> Point:
        """Return where a point is in the drawing."""
        across = self.width - self.left - self.right
        up = self.height - _MARGIN_TOP - _MARGIN_BOTTOM
        x, y = point
        return self.left + across * self.x.place(x), self.height - _MARGIN_BOTTOM - up * self.y.place(y)


def draw(chart: Chart) -> Markup:
    """Return the chart as a figure."""
    curves = [
        replace(curve, points=_fewer(curve.points, _MOST_POINTS), raw=_extremes(curve.raw, _MOST_POINTS))
        for curve in chart.curves
    ]
    # Most charts are against epochs; it is said where one is not.
    title = f"{chart.title} against hours" if chart.across == "hours" else chart.title
    note = element("small", chart.note) if chart.note else ""
    drawings = (_svg(chart, curves, kind) for kind in _DRAWINGS)
    figure = [element("figcaption", title, note), *drawings, folded("Values", _values(chart))]
    return element("figure", *figure, class_="chart", data_points=_said(chart, curves))


def smoothed(curve: Curve) -> Curve:
    """Return the running mean of a curve, whose weights fall off over a fiftieth of its points."""
    decay = math.exp(-50 / len(curve.points))
    points, mean, weight = [], 0.0, 0.0
    for x, y in curve.points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        points.append((x, mean / weight))
    return replace(curve, points=points, raw=curve.points)


def described(chart: Chart) -> str:
    """Return what the curves show in words."""
    sentences = []
    for curve in chart.curves:
        ys = [y for _, y in curve.points]
        words = chart.written(ys[0])
        if len(ys) > 1:
            words = f"from {words} to {chart.written(ys[-1])}"
        spread = "" if len(ys) < 3 else f", lowest {chart.written(min(ys))}, highest {chart.written(max(ys))}"
        sentences.append(f"{curve.label or chart.title}: {words}{spread}")
    return f"{chart.title} against {chart.across}. {'; '.join(sentences)}."


def _svg(chart: Chart, curves: Sequence[Curve], kind: str) -> Markup:
    width, height, letters, ticks = _DRAWINGS[kind]
    ends = [(curve.points[-1], _end_label(chart, curve, letters), _color(curve)) for curve in curves]
    ends += [(curve.points[-1], _cut(curve.label, letters), "reference") for curve in chart.reference]
    right = 14 + _LETTER * max(len(text) for _, text, _ in ends)
    points = [point for curve in (*curves, *chart.reference) for point in (*curve.points, *curve.raw)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x = linear_axis(xs, ticks, from_zero=True, tight=True, whole=chart.is_whole)
    y = log_axis(ys, 5) if chart.is_log else linear_axis(ys, 5, from_zero=chart.from_zero)
    left = 10 + 18 * bool(chart.unit) + _LETTER * max(map(len, y.labels()))
    frame = Frame(width, height, left, right, x, y)
    drawn = [
        element("title", described(chart)),
        _grid(frame),
        *(_curve(curve, frame, "reference") for curve in chart.reference),
        *(_path(curve.raw, frame, f"raw {_color(curve)}") for curve in curves if curve.raw),
        *(_curve(curve, frame, _color(curve)) for curve in curves),
        _end_labels(ends, frame),
        _axis_titles(chart, frame),
    ]
    return element("svg", *drawn, class_=kind, viewBox=f"0 0 {width:g} {height:g}", role="img")


def _color(curve: Curve) -> str:
    return f"c{curve.color % COLORS}"


def _grid(frame: Frame) -> Markup:
    left, bottom = frame.place((frame.x.low, frame.y.low))
    right, top = frame.place((frame.x.high, frame.y.high))
    parts = []
    for tick, label in zip(frame.y.ticks, frame.y.labels(), strict=True):
        _, y = frame.place((frame.x.low, tick))
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y))
        parts.append(element("text", label, x=left - 7, y=y + 4, class_="end"))
    for tick, label in zip(frame.x.ticks, frame.x.labels(), strict=True):
        x, _ = frame.place((tick, frame.y.low))
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 5))
        parts.append(element("text", label, x=x, y=bottom + 19, class_="middle"))
    box = f"{left:.1f} {top:.1f} {right:.1f} {bottom:.1f}"
    return element("g", *parts, class_="grid", data_box=box)


def _axis_titles(chart: Chart, frame: Frame) -> Markup:
    x, _ = frame.place(((frame.x.low + frame.x.high) / 2, frame.y.low))
    titles = [element("text", chart.across, x=x, y=frame.height - 7, class_="middle")]
    if chart.unit:
        middle = (frame.height - _MARGIN_BOTTOM + _MARGIN_TOP) / 2
        turned = f"translate(12 {middle:.1f}) rotate(-90)"
        titles.append(element("text", chart.unit, transform=turned, class_="middle"))
    return element("g", *titles, class_="titles")


def _curve(curve: Curve, frame: Frame, kind: str) -> Markup:
    is_dashed = curve.is_dashed or curve.color >= COLORS
    parts = [_path(curve.points, frame, f"curve {kind}" + " dashed" * is_dashed)]
    if curve.is_marked or len(curve.points) == 1:
        for point in curve.points:
            x, y = frame.place(point)
            parts.append(element("circle", cx=x, cy=y, r=3.5, class_=f"dot {kind}"))
    return joined(parts)


def _path(points: Sequence[Point], frame: Frame, kind: str) -> Markup:
    places = [frame.place(point) for point in points]
    steps = (f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(places))
    return element("path", d="".join(steps), class_=kind)


def _end_label(chart: Chart, curve: Curve, letters: int) -> str:
    """Return what a curve is, with its last value if there is room."""
    both = f"{curve.label} {chart.written(curve.points[-1][1])}".strip()
    return both if len(both) <= letters or not curve.label else _cut(curve.label, letters)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _end_labels(ends: Sequence[tuple[Point, str, str]], frame: Frame) -> Markup:
    """Write labels of a kind at the ends of curves, moved up or down where they would overlap."""
    placed = sorted((frame.place(point)[1], text, kind) for point, text, kind in ends)
    heights = _apart([y for y, _, _ in placed], frame.height - _MARGIN_BOTTOM)
    x = frame.width - frame.right + 8
    labels = (
        element("text", text, x=x, y=y + 4, class_=f"label {kind}")
        for y, (_, text, kind) in zip(heights, placed, strict=True)
    )
    return element("g", *labels)


def _apart(heights: Sequence[float], lowest: float) -> list[float]:
    """Return ascending heights, moved as little as possible so that a line of text fits between any two."""
    # With a line of text per label taken off, heights need only ascend: labels that do not share their mean.
    groups: list[tuple[float, int]] = []  # mean and number
    for number, height in enumerate(heights):
        mean, count = height - number * _LINE, 1
        while groups and groups[-1][0] > mean:
            other, others = groups.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        groups.append((mean, count))
    ascending = [mean for mean, count in groups for _ in range(count)]
    last = lowest - (len(ascending) - 1) * _LINE
    return [max(_MARGIN_TOP, min(mean, last)) + number * _LINE for number, mean in enumerate(ascending)]


def _fewer(points: Sequence[Item], most: int) -> list[Item]:
    """Return every n-th point, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def _extremes(points: Sequence[Point], most: int) -> list[Point]:
    """Return the ends, and the lowest and the highest point of each part in their order: spikes remain."""
    if len(points) <= most:
        return list(points)
    parts = most // 2
    bounds = [round(number * len(points) / parts) for number in range(parts + 1)]
    kept = [points[0]]
    for first, last in pairwise(bounds):
        part = points[first:last]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _values(chart: Chart) -> Markup:
    """Return the points as a table: one row for each place on the horizontal axis, some of many."""
    columns = [dict(curve.raw or curve.points) for curve in chart.curves]
    xs = sorted({x for column in columns for x in column})
    shown = _fewer(xs, _MOST_ROWS)
    head = [chart.across.capitalize(), *(curve.label or chart.title for curve in chart.curves)]
    rows = [
        [_across(x), *(chart.written(column[x]) if x in column else "" for column in columns)] for x in shown
    ]
    some = "" if len(shown) == len(xs) else f", {len(shown)} of {len(xs):,} points"
    return table(head, rows, caption=f"{chart.title} against {chart.across}{some}", numeric=True)


def _said(chart: Chart, curves: Sequence[Curve]) -> str:
    said = [
        {
            "label": curve.label,
            "color": curve.color % COLORS,
            "x": [_across(x) for x, _ in curve.points],
            "y": [chart.written(y) for _, y in curve.points],
        }
        for curve in curves
    ]
    return json.dumps({"across": chart.across, "curves": said}, separators=(",", ":"))


def _across(x: float) -> str:
    return f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"
