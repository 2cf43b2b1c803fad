"""Predicted efficiency of training on many GPUs, with stock Horovod and with ours, and checks of the model.

No other rank takes part. When gradients are ready during backward is measured on this machine; networks and
GPUs are described by `constants.py`; the model is compared with the recorded `scaling` result and with
published efficiencies. Charts are drawn by matplotlib, which the `bench` extra of setup.cfg installs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.results import Figure, Record, Result, read_records
from horovod_volo.bench.scaling_study.constants import constant
from horovod_volo.bench.scaling_study.network import FABRICS, FabricName
from horovod_volo.bench.scaling_study.prediction import (
    MODELS,
    SYSTEMS,
    Assumed,
    PredictedModel,
    measured_gradient_times,
    predicted_step,
)
from horovod_volo.bench.scaling_study.validation import CheckedTime, checked, published_points
from horovod_volo.config.arguments import whole_number
from horovod_volo.core.errors import UserError

_GOALS = {40: 98.0, 256: 97.5, 1024: 97.0, 10_000: 95.5}  # per cent, drawn in the charts
_FEW = 4  # hosts, up to which the goal of the error is 3 %
_LOWEST_EFFICIENCY = 80.0  # where the axis begins, unless a line is below

Lines = Mapping[str, Mapping[int, float]]  # y by x, from left to right, by name
# Lines differ by dashes and markers as well as by colour.
_STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1)))
_MARKERS = "osD^vx"


def measure(
    *,
    models: Annotated[Sequence[PredictedModel], Flag("models whose step time is known")] = MODELS,
    fabrics: Annotated[Sequence[FabricName], Flag("what connects the GPUs")] = tuple(FABRICS),
    ranks: Annotated[
        Sequence[int],
        Flag("numbers of GPUs", read=whole_number(2, because=": one rank exchanges nothing")),
    ] = (8, 40, 256, 1024, 10_000),
    img_size: Annotated[int, Flag("side of the images of the measured backward, in pixels")] = 112,
    negotiation_us: Annotated[
        float, Flag("microseconds in which all ranks agree on a message, times log2 of the ranks")
    ] = 100.0,
    cycle_ms: Annotated[float, Flag("HOROVOD_CYCLE_TIME, in milliseconds")] = 1.0,
    sigma: Annotated[float, Flag("standard deviation of a rank's step, as a fraction of it")] = 0.005,
    figures: Annotated[str, Flag("folder for charts; empty: none; needs matplotlib")] = "",
) -> Result:
    """Predict the efficiency of each network on each fabric."""
    if figures and not find_spec("matplotlib"):
        raise UserError("Charts need matplotlib: pip install 'horovod_volo[bench]'. Or leave out --figures.")
    record = next((record for record in reversed(read_records()) if record["name"] == "scaling"), None)
    if figures and record:
        _draw_exchange(Path(figures) / "exchange.svg", record)
    rows = _validation_figures(checked(record) if record else [])
    for point in published_points():
        rows.append(Figure(f"{point.name}: published", 100 * point.published, "%"))
        rows.append(Figure(f"{point.name}: model, the worst that fits", 100 * point.low, "%"))
        rows.append(Figure(f"{point.name}: model, the best that fits", 100 * point.high, "%"))
    workloads = [measured_gradient_times(model, img_size) for model in models]
    for fabric in fabrics:
        gpu, name = fabric.partition("-")[0], FABRICS[fabric].name
        lines: dict[str, dict[int, float]] = {}
        for workload in workloads:
            alone, copy_rate = constant(f"{gpu} {workload.name} step"), constant(f"{gpu} copy rate")
            assumed = Assumed(sigma, negotiation_us / 1e6, cycle_ms / 1e3, alone, copy_rate)
            for count in ranks:
                for system in SYSTEMS:
                    step = predicted_step(workload, FABRICS[fabric], count, system, assumed)
                    label = f"{name}, {workload.name}, {count} ranks: {system}"
                    rows.append(Figure(label, 100 * alone / step, "%"))
                    lines.setdefault(f"{workload.name}, {system}", {})[count] = rows[-1].value
        if figures:
            title = f"Predicted, not measured: {name}, a step's spread {100 * sigma:g} %"
            lines["goal"] = {count: _GOALS[count] for count in ranks if count in _GOALS}
            lowest = min(value for points in lines.values() for value in points.values())
            y_range = (_LOWEST_EFFICIENCY if lowest >= _LOWEST_EFFICIENCY else 0.0, 100.0)
            draw(Path(figures) / f"{fabric}.svg", lines, title, ("ranks", "efficiency, %"), y_range)
    title = f"predicted efficiency; spread of a step {100 * sigma:g} %"
    title += f", {negotiation_us:g} us a level to agree, {cycle_ms:g} ms cycles"
    return Result("simulate", title, rows)


def _validation_figures(points: Sequence[CheckedTime]) -> list[Figure]:
    rows = []
    for point in points:
        label = f"{point.ranks} hosts, {point.what}"
        rows.append(Figure(f"{label}: measured", 1e3 * point.measured, "ms"))
        rows.append(Figure(f"{label}: predicted", 1e3 * point.predicted, "ms"))
    ring = [point for point in points if "server" not in point.what]
    # More hosts compete for two cores, so that their computation delays the exchange too.
    few = [point for point in ring if point.ranks <= _FEW]
    for label, chosen in ((f", up to {_FEW} hosts", few), ("", ring)):
        if chosen:
            worst = max(abs(point.error) for point in chosen)
            rows.append(Figure(f"largest error of the ring's predictions{label}", 100 * worst, "%"))
    return rows


def _draw_exchange(file: Path, record: Record) -> None:
    """Draw how many times faster the ring was, and N/2."""
    ratios = {
        int(figure["label"].split()[0]): figure["value"]
        for figure in record["figures"]
        if " hosts of " in figure["label"] and figure["label"].endswith(": ring faster")
    }
    if not ratios:
        raise UserError("The recorded scaling result has no hosts: run `bench scaling --record` as root.")
    bound = {count: count / 2 for count in ratios}
    title = "A parameter server's time over the ring's, hosts on equal links"
    lines = {"measured": ratios, "N / 2, bandwidth alone": bound}
    draw(file, lines, title, ("hosts", "times"), (0.0, 1.1 * max(*ratios.values(), *bound.values())))


def draw(
    file: Path, lines: Lines, title: str, axis_labels: tuple[str, str], y_range: tuple[float, float]
) -> None:
    """Write a chart as SVG, with a logarithmic x axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "fixed", "svg.fonttype": "none"}):
        drawing = Drawing(figsize=(8, 4.5), layout="constrained")
        axes = drawing.add_subplot()
        for (name, points), style, marker in zip(lines.items(), _STYLES, _MARKERS, strict=False):
            axes.plot(*zip(*points.items(), strict=True), label=name, ls=style, marker=marker, markersize=4)
        ticks = sorted({place for points in lines.values() for place in points})
        x, y = axis_labels
        axes.set(title=title, xlabel=x, ylabel=y, ylim=y_range, xscale="log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd")
        drawing.legend(loc="outside right upper")
        drawing.savefig(file, metadata={"Date": None})
