"""A line chart as SVG, with the same points as a table for those who cannot see it.

Each chart is drawn twice, for wide and for narrow places, so that its text is of one size everywhere; the
style sheet shows one of the two. `page.js` reads the places of points from the paths, and the texts of its
tooltip from `data-points`, so both have the same points in the same order.
"""

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
_LETTER = 7.7  # width of a letter
_MARGIN_TOP, _MARGIN_RIGHT, _MARGIN_BOTTOM = 12.0, 20.0, 44.0
# Width, height, and ticks of the horizontal axis.
_DRAWINGS = {"wide": (540.0, 270.0, 6), "narrow": (340.0, 240.0, 4)}
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
        decimals = max(0, -math.floor(math.log10(self.ticks[1] - self.ticks[0]) + _ROUNDING))
        return [f"{tick + 0.0:,.{decimals}f}" for tick in self.ticks]


def linear_axis(values: Sequence[float], ticks: int, *, from_zero: bool = False, whole: bool = False) -> Axis:
    """Return an axis over values with about so many ticks; those of a `whole` one are whole numbers."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        spread = abs(high) / 2 or 0.5
        low, high = low - spread, high + spread
    exact = (high - low) / ticks
    unit = 10.0 ** math.floor(math.log10(exact))
    step = min((factor * unit for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / exact)))
    step = max(step, float(whole))
    first, last = math.floor(low / step + _ROUNDING), math.ceil(high / step - _ROUNDING)
    multiples = [float(f"{number * step:.12g}") for number in range(first, last + 1)]
    return Axis(multiples[0], multiples[-1], multiples)


def log_axis(values: Sequence[float], ticks: int) -> Axis:
    """Return a logarithmic axis over positive values, with ticks at powers of ten."""
    exponents = linear_axis(list(map(math.log10, values)), ticks, whole=True).ticks
    powers = [10.0**exponent for exponent in exponents]
    return Axis(powers[0], powers[-1], powers, is_log=True)


@dataclass(frozen=True)
class Curve:
    label: str
    points: Sequence[Point]
    color: int = 0
    is_dashed: bool = False
    is_marked: bool = False  # each point has a dot
    raw: Sequence[Point] = ()  # the points before they were smoothed: a thin line behind

    @property
    def kind(self) -> str:
        """Return the classes of the style sheet that colour it."""
        return f"c{self.color % COLORS}" + " dashed" * (self.is_dashed or self.color >= COLORS)


@dataclass(frozen=True)
class Chart:
    """The curves of a chart, and how it is labelled."""

    title: str
    what: Quantity
    across: str  # what the horizontal axis is
    curves: Sequence[Curve]  # later ones over earlier ones
    is_log: bool = False


def draw(chart: Chart) -> Markup:
    """Return the chart as a figure: its title, each curve's name and last value, and the drawings."""
    # Most charts are against epochs; it is said where one is not.
    title = f"{chart.title} against hours" if chart.across == "hours" else chart.title
    smooth = any(curve.raw for curve in chart.curves)
    note = element("small", "bold: running mean; thin: each log point") if smooth else ""
    curves = [replace(each, points=_thinned(each.points), raw=_thinned(each.raw)) for each in chart.curves]
    thinned = replace(chart, curves=curves)
    parts = [element("figcaption", title, note), _legend(chart), *(_svg(thinned, kind) for kind in _DRAWINGS)]
    values = folded("Values", _values(chart))
    return element("figure", *parts, values, class_="chart", data_points=_tooltips(thinned))


def _legend(chart: Chart) -> Markup:
    items = []
    for curve in chart.curves:
        swatch = element("i", class_=curve.kind) if curve.label else ""
        value = chart.what.written(curve.points[-1][1])
        items.append(element("li", swatch, f"{curve.label} {value}".strip()))
    return element("ul", *items, class_="legend")


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
    width, height, ticks = _DRAWINGS[kind]
    xs, ys = zip(*(point for each in chart.curves for point in (*each.points, *each.raw)), strict=True)
    x = linear_axis(xs, ticks, from_zero=True)
    y = linear_axis(ys, _VERTICAL_TICKS, from_zero=chart.what.from_zero)
    y = log_axis(ys, _VERTICAL_TICKS) if chart.is_log else y
    left = 10 + 18 * bool(chart.what.unit) + _LETTER * max(map(len, y.labels()))
    x = replace(x, start=left, end=width - _MARGIN_RIGHT)
    y = replace(y, start=height - _MARGIN_BOTTOM, end=_MARGIN_TOP)
    parts = [
        _grid(chart, x, y),
        *(_path(curve.raw, x, y, f"raw {curve.kind}") for curve in chart.curves if curve.raw),
        *(_curve(curve, x, y) for curve in chart.curves),
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
    parts = [_path(curve.points, x, y, f"curve {curve.kind}")]
    if curve.is_marked or len(curve.points) == 1:
        places = ((x.place(across), y.place(up)) for across, up in curve.points)
        parts += [element("circle", cx=cx, cy=cy, r=3.5, class_=f"dot {curve.kind}") for cx, cy in places]
    return joined(parts)


def _path(points: Sequence[Point], x: Axis, y: Axis, kind: str) -> Markup:
    places = (f"{x.place(across):.1f} {y.place(up):.1f}" for across, up in points)
    return element("path", d=f"M{'L'.join(places)}", class_=kind)


def _values(chart: Chart) -> Markup:
    """Return the points as a table: one row for each place on the horizontal axis, some of many."""
    columns = [dict(curve.raw or curve.points) for curve in chart.curves]
    xs = sorted({x for column in columns for x in column})
    shown = sorted({*xs[:: -(-len(xs) // _MOST_ROWS)], xs[-1]})
    some = "" if len(shown) == len(xs) else f", {len(shown)} of {len(xs):,} points"
    head = [chart.across.capitalize(), *(curve.label or chart.title for curve in chart.curves)]
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
        for curve in chart.curves
    ]
    return json.dumps({"across": chart.across, "curves": curves}, separators=(",", ":"))


def _across(x: float) -> str:
    return f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"
