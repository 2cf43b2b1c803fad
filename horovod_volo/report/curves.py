"""The charts of metrics.jsonl, where the time of runs went, and their speed against the number of ranks.

A chart has a curve for each run; numbers that never change are a sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from horovod_volo.report.chart import Chart, Curve, draw, smoothed
from horovod_volo.report.markup import Markup, element, joined, table
from horovod_volo.report.quantities import AVERAGED, SPEED, TIME_PARTS, Quantity, quantity
from horovod_volo.report.run_folder import RunFolder

_SMOOTHED_FROM, _MARKED_TO = 60, 40  # points
_LOG_RATIO = 50
_LEAST_REST = 0.0005  # of the time
_PARTS = [*TIME_PARTS.values(), "the rest"]
_TITLES_OF_EVALUATION = {"loss": "Loss on held-out images", "bad_samples": "Damaged images left out"}
_LEAST_WAIT = 1e-4  # as a fraction of the time; a smaller one is rounded too coarsely in metrics.jsonl


def grouped(parts: Sequence[Markup]) -> Markup:
    """Return charts and tables beside each other and, behind them, the sentences."""
    sentences = [part for part in parts if part.startswith("<p")]
    charts = [part for part in parts if part and part not in sentences]
    return joined([element("div", *charts, class_="charts") if charts else Markup(), *sentences])


def training_chart(runs: Sequence[RunFolder], key: str, across: str = "epochs") -> Markup:
    """Return the chart of a key of the log points: a curve for each run."""
    return _chart(runs, {key: ""}, quantity(key).title, across)


def evaluation_chart(runs: Sequence[RunFolder], key: str, across: str = "epochs") -> Markup:
    """Return the chart of a metric: for each run a curve, and one for its averaged weights."""
    labels = {key: "raw" if len(runs) == 1 else "", AVERAGED + key: "averaged"}
    title = _TITLES_OF_EVALUATION.get(key, quantity(key).title)
    return _chart(runs, labels, title, across, held_out=True)


def _chart(
    runs: Sequence[RunFolder], labels: Mapping[str, str], title: str, across: str, *, held_out: bool = False
) -> Markup:
    """Return the chart of keys that have labels, or a sentence about numbers that never change."""
    what, axis = quantity(next(iter(labels))), across.replace("epochs", "epoch")
    curves = []
    for number, run in enumerate(runs):
        for place, (key, label) in enumerate(labels.items()):
            records = run.evaluations if held_out else run.training
            points = [
                (each[axis], what.scaled(each[key])) for each in records if key in each and axis in each
            ]
            if not points:
                continue
            curve = Curve(label, points, place, is_marked=held_out and len(points) <= _MARKED_TO)
            if len(runs) > 1:
                name = f"{run.name} {label}".strip()
                curve = replace(curve, label=name, color=number, is_dashed=key.startswith(AVERAGED))
            curves.append(curve)
    if len(runs) == len(curves) == 1:
        curves = [replace(curves[0], label="")]
    if all(len({y for _, y in curve.points}) == 1 for curve in curves):
        return _sentence(curves, what, title) if curves and across == "epochs" else Markup()
    values = [y for curve in curves for _, y in curve.points]
    is_log = what.may_be_log and 0 < _LOG_RATIO * min(values) <= max(values)
    if what.is_smoothed and not held_out:
        curves = [smoothed(curve) if len(curve.points) >= _SMOOTHED_FROM else curve for curve in curves]
    return draw(Chart(title, what, across, curves, is_log))


def _sentence(curves: Sequence[Curve], what: Quantity, title: str) -> Markup:
    parts = [f"{curve.label} {what.written(curve.points[0][1])}".strip() for curve in curves]
    if len({curve.points[0][1] for curve in curves}) == 1:
        parts = [what.written(curves[0].points[0][1])]
    throughout = " throughout" if len(curves[0].points) > 1 else ""
    return element("p", f"{title}: {', '.join(parts)}{throughout}.", class_="constant")


def speed(runs: Sequence[RunFolder]) -> Markup:
    """Return the throughput, memory, and where the time went."""
    return joined([grouped([training_chart(runs, key) for key in SPEED]), _time_shares(runs)])


def mean_over_time(run: RunFolder, key: str) -> float | None:
    """Return the mean of a key over the time of training, of TIME_PARTS over wall time; None without it."""
    total = weight = seen = 0.0
    for record in run.training:
        images, seen = record["images_seen"] - seen, record["images_seen"]
        if key in record:
            seconds = images / record["images_per_second"]
            # Wall time includes checkpoints between epochs. A wait for data is recorded as a fraction of it,
            # and as one of the seconds of training.
            if key in TIME_PARTS and record["time_data"] >= _LEAST_WAIT:
                seconds *= max(1.0, record["data_wait"] / record["time_data"])
            total, weight = total + record[key] * seconds, weight + seconds
    return total / weight if weight else None


def _time_shares(runs: Sequence[RunFolder]) -> Markup:
    """Return where the time of each run went, as bars."""
    parts = [element("figcaption", "Where the time of training went")]
    for run in runs:
        means = {name: mean_over_time(run, key) for key, name in TIME_PARTS.items()}
        shares = {name: mean for name, mean in means.items() if mean is not None}
        if not shares:
            continue
        if (rest := 1 - sum(shares.values())) > _LEAST_REST:
            shares["the rest"] = rest
        bar, items = [], []
        for name, share in shares.items():
            color = f"b{_PARTS.index(name)}"
            bar.append(element("span", class_=color, style=f"flex-grow:{share:.4f}"))
            swatch = element("span", class_=f"swatch {color}")
            items.append(element("li", swatch, f"{name} {100 * share:.1f} %"))
        parts += [element("h3", run.name)] if len(runs) > 1 else []
        parts.append(element("div", *bar, class_="bar", aria_hidden="true"))
        parts.append(element("ul", *items, class_="shares"))
    return element("figure", *parts, class_="wide-figure") if len(parts) > 1 else Markup()


def speeds(run: RunFolder) -> dict[tuple[int, int], float]:
    """Return the median images per second of a run by the numbers of ranks and nodes that it had."""
    found: dict[tuple[int, int], list[float]] = {}
    for record in run.training:
        hosts = run.hosts_at(record["step"])
        if hosts:
            found.setdefault((len(hosts), len(set(hosts))), []).append(record["images_per_second"])
    # The first log point contains the warm-up of kernels and caches.
    return {hosts: median(values[1:] or values) for hosts, values in found.items()}


def scaling(runs: Sequence[RunFolder]) -> Markup:
    """Return images per second against ranks; nothing, if there is nothing to compare."""
    by_network: dict[str, list[tuple[int, float, int, str]]] = {}
    for run in runs:
        network = f"{run.settings.get('model.model')}, {run.settings.get('model.img_size', 0)} px"
        for (ranks, nodes), speed in speeds(run).items():
            by_network.setdefault(network, []).append((ranks, speed, nodes, run.name))
    return joined(
        _scaling_of(network, sorted(points))
        for network, points in by_network.items()
        if len({ranks for ranks, *_ in points}) > 1
    )


def _scaling_of(network: str, points: Sequence[tuple[int, float, int, str]]) -> Markup:
    """Return a table of ranks, speed, nodes and run, which ascend."""
    least = points[0][0]
    base = max(speed for ranks, speed, *_ in points if ranks == least) / least
    rows = []
    for ranks, speed, nodes, name in points:
        efficiency = f"{100 * speed / ranks / base:.1f} %"
        rows.append([name, f"{ranks}", f"{nodes}", f"{speed:,.0f}", f"{speed / ranks:,.1f}", efficiency])
    head = ["Run", "Ranks", "Nodes", "Images/s", "Images/s and rank", "Efficiency"]
    caption = f"{network}; the efficiency is relative to the smallest number of ranks"
    return table(head, rows, caption=caption, numeric=True)
