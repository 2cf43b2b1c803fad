"""Training on many GPUs, computed: the efficiency of stock Horovod and of ours, and what the model is worth.

No rank is met. When gradients are there during backward is measured on this machine; links and GPUs are the
table of constants in bench/simulation/constants.py; the model is held against the recorded `scaling` result
and against what others published.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from horovod_volo.bench.figures import Chart, Line
from horovod_volo.bench.results import Figure, Record, Result, read_records
from horovod_volo.bench.simulation.fabrics import FABRICS, MODELS, gpu_of
from horovod_volo.bench.simulation.landings import measured_workload
from horovod_volo.bench.simulation.prediction import Assumed, System, Workload, predict
from horovod_volo.bench.simulation.published import published_points
from horovod_volo.bench.simulation.validation import Checked, checked
from horovod_volo.core.errors import UserError

GOALS = {40: 98.0, 256: 97.5, 1024: 97.0, 10_000: 95.5}  # per cent, what charts are held against
_SYSTEMS: tuple[System, ...] = ("stock", "ours")
_PASSES = 3
_FEW = 4  # hosts, for which the goal is 3 %
_PERCENT = 100
_MILLISECONDS = 1e3
_MICROSECONDS = 1e6
_LEAST_EFFICIENCY = 80.0  # where the chart begins, unless a line goes lower


def measure(
    *,
    models: Sequence[str],
    fabrics: Sequence[str],
    ranks: Sequence[int],
    img_size: int,
    negotiation_us: float,
    cycle_ms: float,
    sigma: float,
    figures: str,
) -> Result:
    """Predict each network on each fabric; `figures` names a folder for charts, or is empty."""
    if unknown := [name for name in fabrics if name not in FABRICS]:
        raise UserError(f"There is no fabric {unknown[0]}. There are: {', '.join(FABRICS)}.")
    if min(ranks) < 2:
        raise UserError("One rank exchanges nothing. Ask for --ranks of 2 and more.")
    for workload_name in models:
        if workload_name not in MODELS:
            raise UserError(
                f"Nobody has estimated the step of {workload_name}. Choose among: {', '.join(MODELS)}."
            )
    record = next((record for record in reversed(read_records()) if record["name"] == "scaling"), None)
    rows = _validation(checked(record) if record else [])
    rows += [
        row
        for point in published_points()
        for row in (
            Figure(f"{point.name}: published", _PERCENT * point.published, "%"),
            Figure(f"{point.name}: model, the worst that fits", _PERCENT * point.low, "%"),
            Figure(f"{point.name}: model, the best that fits", _PERCENT * point.high, "%"),
        )
    ]
    workloads = [measured_workload(model, img_size, _PASSES) for model in models]
    assume = partial(
        Assumed,
        sigma=sigma,
        negotiation_per_level=negotiation_us / _MICROSECONDS,
        cycle=cycle_ms / _MILLISECONDS,
    )
    goals = [(count, GOALS[count]) for count in ranks if count in GOALS]
    for fabric in fabrics:
        lines = [Line("goal", goals)] if goals else []
        for workload in workloads:
            found = _efficiencies(workload, fabric, ranks, assume)
            rows += [
                Figure(f"{FABRICS[fabric].name}, {workload.name}, {count} ranks: {system}", value, "%")
                for count in ranks
                for system, value in ((system, found[system][count]) for system in _SYSTEMS)
            ]
            lines += [Line(f"{workload.name}, {system}", list(found[system].items())) for system in _SYSTEMS]
        if figures:
            _efficiency_chart(FABRICS[fabric].name, lines, sigma).write(Path(figures) / f"{fabric}.svg")
    if figures and record:
        _exchange_chart(record).write(Path(figures) / "exchange.svg")
    agreed = f"{negotiation_us:g} us a level to agree, {cycle_ms:g} ms cycles"
    title = f"predicted efficiency; spread of a step {_PERCENT * sigma:g} %, {agreed}"
    return Result("simulate", title, rows)


def _efficiencies(
    workload: Workload, fabric: str, ranks: Sequence[int], assume: partial[Assumed]
) -> dict[System, dict[int, float]]:
    gpu = gpu_of(fabric)
    assumed = assume(step_seconds=gpu.step_seconds[workload.name], copy_rate=gpu.copy_rate)
    return {
        system: {
            count: _PERCENT * predict(workload, FABRICS[fabric], count, system, assumed).efficiency
            for count in ranks
        }
        for system in _SYSTEMS
    }


def _validation(points: Sequence[Checked]) -> list[Figure]:
    rows = []
    for point in points:
        label = f"{point.ranks} hosts, {point.what}"
        rows += [
            Figure(f"{label}: measured", _MILLISECONDS * point.measured, "ms"),
            Figure(f"{label}: predicted", _MILLISECONDS * point.predicted, "ms"),
        ]
    ring = [point for point in points if "server" not in point.what]
    # More hosts than these share two cores so closely that their work, too, is on the way.
    for label, told in ((f", up to {_FEW} hosts", [p for p in ring if p.ranks <= _FEW]), ("", ring)):
        if told:
            worst = max(abs(point.error) for point in told)
            rows.append(Figure(f"largest error of the ring's predictions{label}", _PERCENT * worst, "%"))
    return rows


def _efficiency_chart(fabric: str, lines: Sequence[Line], sigma: float) -> Chart:
    least = min(y for line in lines for _, y in line.points)
    return Chart(
        title=f"Predicted, not measured: {fabric}, a step's spread {_PERCENT * sigma:g} %",
        x="ranks",
        y="efficiency, %",
        lines=lines,
        y_low=_LEAST_EFFICIENCY if least >= _LEAST_EFFICIENCY else 0.0,
        y_high=100.0,
    )


def _exchange_chart(record: Record) -> Chart:
    """Draw how many times faster the ring was, and N/2."""
    ratios: dict[int, float] = {}
    for figure in record["figures"]:
        label: str = figure["label"]
        if " hosts of " in label and label.endswith(": ring faster"):
            ratios[int(label.split()[0])] = figure["value"]  # the larger gradient comes last
    if not ratios:
        raise UserError("The recorded scaling result has no hosts: run `bench scaling --record` as root.")
    bound = [(float(count), count / 2) for count in ratios]
    return Chart(
        title="A parameter server's time over the ring's, hosts on equal links",
        x="hosts",
        y="times",
        lines=[Line("measured", list(ratios.items())), Line("N / 2, bandwidth alone", bound)],
        y_low=0.0,
        y_high=float(max([*ratios.values(), *(value for _, value in bound)]) * 1.1),
    )
