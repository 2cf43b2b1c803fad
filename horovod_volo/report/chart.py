"""A line chart as SVG, with the same points as a table for those who cannot see it.

Each chart is drawn twice, for wide and for narrow places, so that its text is of one size everywhere; the
style sheet shows one of the two. `page.js` reads the places of points from the paths, and the texts of its
tooltip from `data-points`, so both have the same points in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.quantities import Quantity, short

Point = tuple[float, float]

COLORS = 8  # in the style sheet; later curves are dashed
_MOST_POINTS, _MOST_ROWS = 240, 25
_LETTER, _LINE = 7.7, 16.0  # width of a letter and height of a line of text
_MARGIN_TOP, _MARGIN_BOTTOM = 12.0, 44.0
# Width, height, letters of a label, and ticks of the horizontal axis.
_DRAWINGS = {"wide": (540.0, 290.0, 19, 6), "narrow": (340.0, 260.0, 12, 4)}
_VERTICAL_TICKS = 5
_ROUNDING = 1e-9  # of values that are on a tick


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its ticks, and where it begins and ends in the drawing."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False
    start: float = 0.0
    end: float = 1.0

    def place(self, value: float) -> float:
        """Return where a value is in the drawing."""
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def labels(self) -> list[str]:
        """Return the text of each tick."""
        if self.is_log or max(map(abs, self.ticks)) < 1e-3:
            return [short(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(self.ticks[0]) or 1.0
        decimals = max(0, -math.floor(math.log10(step) + _ROUNDING))
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
    exact = (high - low) / ticks
    unit = 10.0 ** math.floor(math.log10(exact))
    step = min((factor * unit for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / exact)))
    step = max(step, float(whole))
    first, last = math.floor(low / step + _ROUNDING), math.ceil(high / step - _ROUNDING)
    if tight:
        first, last = math.ceil(low / step - _ROUNDING), math.floor(high / step + _ROUNDING)
    multiples = [float(f"{number * step:.12g}") for number in range(first, last + 1)]
    return Axis(low, high, multiples) if tight else Axis(multiples[0], multiples[-1], multiples)


def log_axis(values: Sequence[float], ticks: int) -> Axis:
    """Return a logarithmic axis over positive values: ticks at powers of ten, and between few of them."""
    first = math.floor(math.log10(min(values)) + _ROUNDING)
    last = max(first + 1, math.ceil(math.log10(max(values)) - _ROUNDING))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    powers = range(first, last + 1, -(-(last - first) // ticks))
    candidates = [factor * 10.0**power for power in powers for factor in factors]
    low = max(tick for tick in candidates if tick <= min(values) * (1 + _ROUNDING))
    above = (tick for tick in candidates if tick > low and tick >= max(values) * (1 - _ROUNDING))
    high = next(above, 10.0**last)
    return Axis(low, high, [tick for tick in candidates if low <= tick <= high], is_log=True)


@dataclass(frozen=True)
class Curve:
    """A curve of a chart."""

    label: str
    points: Sequence[Point]
    color: int = 0
    is_dashed: bool = False
    is_marked: bool = False  # each point has a dot
    is_reference: bool = False  # grey, and without values
    raw: Sequence[Point] = ()  # the points before they were smoothed: a thin line behind

    @property
    def kind(self) -> str:
        """Return the class of the style sheet that colours it."""
        return "reference" if self.is_reference else f"c{self.color % COLORS}"


@dataclass(frozen=True)
class Chart:
    """The curves of a chart, and how it is labelled."""

    title: str
    what: Quantity
    across: str  # what the horizontal axis is
    curves: Sequence[Curve]  # later ones over earlier ones
    is_log: bool = False

    @property
    def measured(self) -> list[Curve]:
        """Return the curves that have values."""
        return [curve for curve in self.curves if not curve.is_reference]


def draw(chart: Chart) -> Markup:
    """Return the chart as a figure."""
    # Most charts are against epochs; it is said where one is not.
    title = f"{chart.title} against hours" if chart.across == "hours" else chart.title
    is_smoothed = any(curve.raw for curve in chart.curves)
    note = element("small", "bold: running mean; thin: each log point") if is_smoothed else ""
    curves = [
        replace(curve, points=_thinned(curve.points), raw=_thinned(curve.raw)) for curve in chart.curves
    ]
    thinned = replace(chart, curves=curves)
    drawings = (_svg(thinned, kind) for kind in _DRAWINGS)
    figure = [element("figcaption", title, note), *drawings, folded("Values", _values(chart))]
    return element("figure", *figure, class_="chart", data_points=_tooltips(thinned))


def smoothed(curve: Curve) -> Curve:
    """Return the running mean of a curve, whose weights fall off over a fiftieth of its points."""
    decay = math.exp(-50 / len(curve.points))
    points, mean, weight = [], 0.0, 0.0
    for x, y in curve.points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        points.append((x, mean / weight))
    return replace(curve, points=points, raw=curve.points)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return the ends of a long curve, and the lowest and the highest point of each part: spikes remain."""
    if len(points) <= _MOST_POINTS:
        return points
    parts = _MOST_POINTS // 2
    kept = [points[0]]
    for first, last in pairwise(round(number * len(points) / parts) for number in range(parts + 1)):
        part = points[first:last]
        kept += sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    return [*kept, points[-1]]


def _svg(chart: Chart, kind: str) -> Markup:
    width, height, letters, ticks = _DRAWINGS[kind]
    labels = [_end_label(chart, curve, letters) for curve in chart.curves]
    xs, ys = zip(*(point for each in chart.curves for point in (*each.points, *each.raw)), strict=True)
    x = linear_axis(xs, ticks, from_zero=True, tight=True, whole=chart.across == "ranks")
    y = linear_axis(ys, _VERTICAL_TICKS, from_zero=chart.what.from_zero)
    if chart.is_log:
        y = log_axis(ys, _VERTICAL_TICKS)
    left = 10 + 18 * bool(chart.what.unit) + _LETTER * max(map(len, y.labels()))
    x = replace(x, start=left, end=width - 14 - _LETTER * max(map(len, labels)))
    y = replace(y, start=height - _MARGIN_BOTTOM, end=_MARGIN_TOP)
    parts = [
        _grid(chart, x, y),
        *(_path(curve.raw, x, y, f"raw {curve.kind}") for curve in chart.curves if curve.raw),
        *(_curve(curve, x, y) for curve in chart.curves),
        _end_labels(chart.curves, labels, x, y),
    ]
    size, name = f"0 0 {width:g} {height:g}", f"{chart.title} against {chart.across}"
    return element("svg", *parts, class_=kind, viewBox=size, role="img", aria_label=name)


def _grid(chart: Chart, x: Axis, y: Axis) -> Markup:
    """Return the axes with their titles; `page.js` finds their box in `data-box`."""
    bottom = y.start + _MARGIN_BOTTOM - 7
    parts = [element("text", chart.across, x=(x.start + x.end) / 2, y=bottom, class_="middle")]
    if chart.what.unit:
        turned = f"translate(12 {(y.start + y.end) / 2:.1f}) rotate(-90)"
        parts.append(element("text", chart.what.unit, transform=turned, class_="middle"))
    for place, label in zip(map(y.place, y.ticks), y.labels(), strict=True):
        parts.append(element("line", x1=x.start, x2=x.end, y1=place, y2=place))
        parts.append(element("text", label, x=x.start - 7, y=place + 4, class_="end"))
    for place, label in zip(map(x.place, x.ticks), x.labels(), strict=True):
        parts.append(element("line", x1=place, x2=place, y1=y.start, y2=y.start + 5))
        parts.append(element("text", label, x=place, y=y.start + 19, class_="middle"))
    box = f"{x.start:.1f} {y.end:.1f} {x.end:.1f} {y.start:.1f}"
    return element("g", *parts, class_="grid", data_box=box)


def _curve(curve: Curve, x: Axis, y: Axis) -> Markup:
    is_dashed = curve.is_dashed or curve.color >= COLORS
    parts = [_path(curve.points, x, y, f"curve {curve.kind}" + " dashed" * is_dashed)]
    if curve.is_marked or len(curve.points) == 1:
        places = ((x.place(across), y.place(up)) for across, up in curve.points)
        parts += [element("circle", cx=cx, cy=cy, r=3.5, class_=f"dot {curve.kind}") for cx, cy in places]
    return joined(parts)


def _path(points: Sequence[Point], x: Axis, y: Axis, kind: str) -> Markup:
    places = (f"{x.place(across):.1f} {y.place(up):.1f}" for across, up in points)
    return element("path", d=f"M{'L'.join(places)}", class_=kind)


def _end_label(chart: Chart, curve: Curve, letters: int) -> str:
    """Return what a curve is, with its last value if there is room."""
    both = f"{curve.label} {chart.what.written(curve.points[-1][1])}".strip()
    if not curve.label or (len(both) <= letters and not curve.is_reference):
        return both
    return curve.label if len(curve.label) <= letters else f"{curve.label[: letters - 1]}…"


def _end_labels(curves: Sequence[Curve], labels: Sequence[str], x: Axis, y: Axis) -> Markup:
    """Write labels at the ends of curves, moved up or down where they would overlap."""
    ends = (y.place(curve.points[-1][1]) for curve in curves)
    placed = sorted(zip(ends, labels, (curve.kind for curve in curves), strict=True))
    heights = _apart([height for height, _, _ in placed], y.start)
    texts = (
        element("text", label, x=x.end + 8, y=height + 4, class_=f"label {kind}")
        for height, (_, label, kind) in zip(heights, placed, strict=True)
    )
    return element("g", *texts)


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


def _values(chart: Chart) -> Markup:
    """Return the points as a table: one row for each place on the horizontal axis, some of many."""
    columns = [dict(curve.raw or curve.points) for curve in chart.measured]
    xs = sorted({x for column in columns for x in column})
    shown = sorted({*xs[:: -(-len(xs) // _MOST_ROWS)], xs[-1]})
    some = "" if len(shown) == len(xs) else f", {len(shown)} of {len(xs):,} points"
    head = [chart.across.capitalize(), *(curve.label or chart.title for curve in chart.measured)]
    rows = [
        [_across(x), *(chart.what.written(column[x]) if x in column else "" for column in columns)]
        for x in shown
    ]
    return table(head, rows, caption=f"{chart.title} against {chart.across}{some}", numeric=True)


def _tooltips(chart: Chart) -> str:
    """Return the texts for the points of each curve, as `page.js` reads them."""
    curves = [
        {
            "label": curve.label,
            "color": curve.color % COLORS,
            "x": [_across(x) for x, _ in curve.points],
            "y": [chart.what.written(y) for _, y in curve.points],
        }
        for curve in chart.measured
    ]
    return json.dumps({"across": chart.across, "curves": curves}, separators=(",", ":"))


def _across(x: float) -> str:
    return f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"
