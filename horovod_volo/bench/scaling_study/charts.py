"""Line charts in docs/figures, drawn by matplotlib, which the `bench` extra of setup.cfg installs.

Lines differ by dashes and markers as well as by colour. The files are reproducible: without date, with fixed
ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod_volo.config.errors import UserError

Lines = Mapping[
    str, Sequence[tuple[float, float]]
]  # points (x, y) from left to right, by the name of the line
_STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1)))
_MARKERS = "osD^vx"


def check_matplotlib() -> None:
    """Raise UserError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401  # only charts need it
    except ModuleNotFoundError:
        raise UserError(
            "Charts need matplotlib: pip install -e '.[bench]'. Or leave out --figures."
        ) from None


def draw(file: Path, lines: Lines, *, title: str, x: str, y: str, y_range: tuple[float, float]) -> None:
    """Write a chart as SVG, with a logarithmic x axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "fixed", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(lines.items()):
            style, marker = _STYLES[number % len(_STYLES)], _MARKERS[number % len(_MARKERS)]
            axes.plot(*zip(*points, strict=True), label=name, linestyle=style, marker=marker, markersize=4)
        ticks = sorted({place for points in lines.values() for place, _ in points})
        axes.set(title=title, xlabel=x, ylabel=y, ylim=y_range, xscale="log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd")
        figure.legend(loc="outside right upper")
        figure.savefig(file, metadata={"Date": None})
