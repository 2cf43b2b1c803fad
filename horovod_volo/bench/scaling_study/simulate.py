"""Predicted efficiency of training on many GPUs, with stock Horovod and with ours, and checks of the model.

No other rank takes part. When gradients are ready during backward is measured on this machine; networks and
GPUs are described by `constants.py`; the model is compared with the recorded `scaling` result and with
published efficiencies. Charts are drawn by matplotlib, which the `bench` extra of setup.cfg installs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.results import Figure, Record, Result, read_records
from horovod_volo.bench.scaling_study.constants import constant
from horovod_volo.bench.scaling_study.grad_ready_times import measured_gradient_times
from horovod_volo.bench.scaling_study.network import FABRICS
from horovod_volo.bench.scaling_study.prediction import (
    MODELS,
    SYSTEMS,
    Assumed,
    GradientTimes,
    predict,
    step_seconds,
)
from horovod_volo.bench.scaling_study.validation import Checked, checked, published_points
from horovod_volo.core.errors import UserError

_GOALS = {40: 98.0, 256: 97.5, 1024: 97.0, 10_000: 95.5}  # per cent, drawn in the charts
_FEW = 4  # hosts, up to which the goal of the error is 3 %
_LOWEST_EFFICIENCY = 80.0  # where the axis begins, unless a line is below

Efficiencies = Mapping[str, Mapping[int, float]]  # per cent, by system and ranks

# Lines differ by dashes and markers as well as by colour.
Lines = Mapping[
    str, Sequence[tuple[float, float]]
]  # points (x, y) from left to right, by the name of the line
_STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (3, 1, 1, 1)))
_MARKERS = "osD^vx"


def measure(
    *,
    models: Annotated[Sequence[str], Flag("networks: " + ", ".join(MODELS), metavar="MODEL")] = MODELS,
    fabrics: Annotated[Sequence[str], Flag("networks of GPUs", metavar="NAME")] = tuple(FABRICS),
    ranks: Annotated[Sequence[int], Flag("numbers of GPUs")] = (8, 40, 256, 1024, 10_000),
    img_size: Annotated[int, Flag("side of the images of the measured backward, in pixels")] = 112,
    negotiation_us: Annotated[
        float, Flag("microseconds in which all ranks agree on a message, times log2 of the ranks")
    ] = 100.0,
    cycle_ms: Annotated[float, Flag("HOROVOD_CYCLE_TIME, in milliseconds")] = 1.0,
    sigma: Annotated[float, Flag("standard deviation of a rank's step, as a fraction of it")] = 0.005,
    figures: Annotated[str, Flag("folder for charts; empty: none; needs matplotlib", metavar="DIR")] = "",
) -> Result:
    """Predict the efficiency of each network on each fabric."""
    _check(models, fabrics, ranks)
    if figures:
        check_matplotlib()
    record = next((record for record in reversed(read_records()) if record["name"] == "scaling"), None)
    rows = _validation_figures(checked(record) if record else [])
    for point in published_points():
        rows.append(Figure(f"{point.name}: published", 100 * point.published, "%"))
        rows.append(Figure(f"{point.name}: model, the worst that fits", 100 * point.low, "%"))
        rows.append(Figure(f"{point.name}: model, the best that fits", 100 * point.high, "%"))
    workloads = [measured_gradient_times(model, img_size) for model in models]
    for fabric in fabrics:
        found = {
            workload.name: _efficiencies(workload, fabric, ranks, sigma, negotiation_us / 1e6, cycle_ms / 1e3)
            for workload in workloads
        }
        name = FABRICS[fabric].name
        rows += [
            Figure(f"{name}, {model}, {count} ranks: {system}", efficiency[system][count], "%")
            for model, efficiency in found.items()
            for count in ranks
            for system in SYSTEMS
        ]
        if figures:
            _draw_efficiency(
                Path(figures) / f"{fabric}.svg", found, ranks, f"{name}, a step's spread {100 * sigma:g} %"
            )
    if figures and record:
        _draw_exchange(Path(figures) / "exchange.svg", record)
    assumed = f"{negotiation_us:g} us a level to agree, {cycle_ms:g} ms cycles"
    title = f"predicted efficiency; spread of a step {100 * sigma:g} %, {assumed}"
    return Result("simulate", title, rows)


def _check(models: Sequence[str], fabrics: Sequence[str], ranks: Sequence[int]) -> None:
    if unknown := [name for name in fabrics if name not in FABRICS]:
        raise UserError(f"There is no fabric {unknown[0]}. There are: {', '.join(FABRICS)}.")
    if min(ranks) < 2:
        raise UserError("One rank exchanges nothing. Ask for --ranks of 2 and more.")
    if unknown := [name for name in models if name not in MODELS]:
        raise UserError(f"The step time of {unknown[0]} is not known. Choose among: {', '.join(MODELS)}.")


def _efficiencies(
    workload: GradientTimes, fabric: str, ranks: Sequence[int], sigma: float, negotiation: float, cycle: float
) -> Efficiencies:
    gpu = fabric.partition("-")[0]
    step = step_seconds(gpu, workload.name)
    assumed = Assumed(sigma, negotiation, cycle, step, constant(f"{gpu} copy rate"))
    return {
        system: {
            count: 100 * predict(workload, FABRICS[fabric], count, system, assumed).efficiency
            for count in ranks
        }
        for system in SYSTEMS
    }


def _validation_figures(points: Sequence[Checked]) -> list[Figure]:
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


def _draw_efficiency(file: Path, found: Mapping[str, Efficiencies], ranks: Sequence[int], what: str) -> None:
    lines = {
        f"{model}, {system}": list(efficiency[system].items())
        for model, efficiency in found.items()
        for system in SYSTEMS
    }
    goals = [(count, _GOALS[count]) for count in ranks if count in _GOALS]
    lines |= {"goal": goals} if goals else {}
    lowest = min((value for points in lines.values() for _, value in points), default=0.0)
    begin = _LOWEST_EFFICIENCY if lowest >= _LOWEST_EFFICIENCY else 0.0
    title = f"Predicted, not measured: {what}"
    draw(file, lines, title=title, x="ranks", y="efficiency, %", y_range=(begin, 100.0))


def _draw_exchange(file: Path, record: Record) -> None:
    """Draw how many times faster the ring was, and N/2."""
    ratios: dict[float, float] = {}
    for figure in record["figures"]:
        label: str = figure["label"]
        if " hosts of " in label and label.endswith(": ring faster"):
            ratios[int(label.split()[0])] = figure["value"]  # the larger gradient is the last
    if not ratios:
        raise UserError("The recorded scaling result has no hosts: run `bench scaling --record` as root.")
    bound = [(count, count / 2) for count in ratios]
    lines = {"measured": list(ratios.items()), "N / 2, bandwidth alone": bound}
    top = 1.1 * max(value for points in lines.values() for _, value in points)
    title = "A parameter server's time over the ring's, hosts on equal links"
    draw(file, lines, title=title, x="hosts", y="times", y_range=(0.0, top))


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
    from matplotlib.figure import Figure as Drawing

    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "fixed", "svg.fonttype": "none"}):
        drawing = Drawing(figsize=(8, 4.5), layout="constrained")
        axes = drawing.add_subplot()
        for number, (name, points) in enumerate(lines.items()):
            style, marker = _STYLES[number % len(_STYLES)], _MARKERS[number % len(_MARKERS)]
            axes.plot(*zip(*points, strict=True), label=name, linestyle=style, marker=marker, markersize=4)
        ticks = sorted({place for points in lines.values() for place, _ in points})
        axes.set(title=title, xlabel=x, ylabel=y, ylim=y_range, xscale="log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd")
        drawing.legend(loc="outside right upper")
        drawing.savefig(file, metadata={"Date": None})
