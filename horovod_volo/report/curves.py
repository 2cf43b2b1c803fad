"""The charts of metrics.jsonl, where the time of runs went, and their speed against the number of ranks.

A chart has a curve for each run; numbers that never change are a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from horovod_volo.report.chart import Chart, Curve, draw, smoothed
from horovod_volo.report.markup import Markup, element, joined, table
from horovod_volo.report.quantities import AVERAGED, SPEED, TIME_PARTS, Quantity, quantity
from horovod_volo.report.run_folder import RunFolder

_SMOOTHED_FROM, _MARKED_TO = 60, 40  # points
_LOG_RATIO, _LOG_RATIO_OF_PEAKS = 50, 5
_LEAST_WAIT = 1e-4  # as a fraction of the time; a smaller one is rounded too coarsely in metrics.jsonl
_LEAST_REST = 0.0005  # of the time


def grouped(parts: Sequence[Markup]) -> Markup:
    """Return charts and tables beside each other and, behind them, the sentences."""
    sentences = [part for part in parts if part.startswith("<p")]
    charts = [part for part in parts if part and part not in sentences]
    return joined([element("div", *charts, class_="charts") if charts else Markup(), *sentences])


def training_chart(runs: Sequence[RunFolder], key: str, across: str = "epochs") -> Markup:
    """Return the chart of a key of the log points: a curve for each run."""
    return _chart(runs, {key: ""}, quantity(key).title, across)


def term_charts(runs: Sequence[RunFolder], terms: Sequence[str]) -> list[Markup]:
    """Return the terms of the loss: in one chart for one run, else a chart for each."""
    if len(runs) > 1 or not terms:
        return [training_chart(runs, key) for key in terms]
    labels = {key: quantity(key).title.lower() for key in terms}
    return [_chart(runs, labels, "Terms of the loss, before weighting", "epochs")]


def evaluation_chart(runs: Sequence[RunFolder], key: str, across: str = "epochs") -> Markup:
    """Return the chart of a metric: for each run a curve, and one for its averaged weights."""
    labels = {key: "raw" if len(runs) == 1 else "", AVERAGED + key: "averaged"}
    recorded = [{name for record in run.evaluations for name in record} for run in runs]
    if not any(labels.keys() <= names for names in recorded):
        labels = dict.fromkeys(labels, "")
    title = "Loss on held-out images" if key == "loss" else quantity(key).title
    return _chart(runs, labels, title, across, held_out=True)


def _chart(
    runs: Sequence[RunFolder], labels: Mapping[str, str], title: str, across: str, *, held_out: bool = False
) -> Markup:
    """Return the chart of keys that have labels, or a sentence about numbers that never change."""
    what = quantity(next(iter(labels)))
    curves = _curves(runs, labels, what, across, held_out=held_out)
    if all(len({y for _, y in curve.points}) == 1 for curve in curves):
        return _sentence(curves, what, title) if curves and across == "epochs" else Markup()
    is_log = _is_log(what, curves)
    if what.is_smoothed and not held_out:
        curves = [smoothed(curve) if len(curve.points) >= _SMOOTHED_FROM else curve for curve in curves]
    return draw(Chart(title, what, across, curves, is_log))


def _curves(
    runs: Sequence[RunFolder], labels: Mapping[str, str], what: Quantity, across: str, *, held_out: bool
) -> list[Curve]:
    several, axis = len(runs) > 1, across.replace("epochs", "epoch")
    curves = []
    for number, run in enumerate(runs):
        for place, (key, label) in enumerate(labels.items()):
            records = run.evaluations if held_out else run.training
            known = [record for record in records if key in record and axis in record]
            curve = Curve(
                label=f"{run.name} {label}".strip() if several else label,
                points=[(record[axis], what.scaled(record[key])) for record in known],
                color=number if several else place,
                is_dashed=several and key.startswith(AVERAGED),
                is_marked=held_out and len(known) <= _MARKED_TO,
            )
            curves += [curve] if known else []
    return curves


def _is_log(what: Quantity, curves: Sequence[Curve]) -> bool:
    values = [y for curve in curves for _, y in curve.points]
    if not what.may_be_log or min(values) <= 0:
        return False
    if what.form == "rate":  # a schedule is known by its shape, which is that of a linear axis
        peaks = [max(y for _, y in curve.points) for curve in curves]
        return max(peaks) >= _LOG_RATIO_OF_PEAKS * min(peaks)
    return max(values) >= _LOG_RATIO * min(values)


def _sentence(curves: Sequence[Curve], what: Quantity, title: str) -> Markup:
    parts = [f"{curve.label} {what.written(curve.points[0][1])}".strip() for curve in curves]
    if len({curve.points[0][1] for curve in curves}) == 1:
        parts = [what.written(curves[0].points[0][1])]
    throughout = " throughout" if len(curves[0].points) > 1 else ""
    return element("p", f"{title}: {', '.join(parts)}{throughout}.", class_="constant")


class SpeedPoint(NamedTuple):
    """The speed of a run on a number of ranks."""

    name: str  # of the run
    ranks: int
    nodes: int
    images_per_second: float

    @property
    def of_rank(self) -> float:
        """Return the images per second of one rank."""
        return self.images_per_second / self.ranks


# Of NVIDIA's article on VOLO-D5 on A100, eight to a node.
_PUBLISHED_MODEL = "volo_d5"
_PUBLISHED = (SpeedPoint("published, A100", 8, 1, 500.0), SpeedPoint("published, A100", 40, 5, 2100.0))


def speed(runs: Sequence[RunFolder]) -> Markup:
    """Return the throughput, memory, and where the time went."""
    return joined([grouped([*map(partial(training_chart, runs), SPEED)]), _time_shares(runs)])


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
        means = [(name, mean_over_time(run, key)) for key, name in TIME_PARTS.items()]
        shares = [(f"b{number}", name, mean) for number, (name, mean) in enumerate(means) if mean is not None]
        rest = 1 - sum(share for _, _, share in shares)
        if not shares:
            continue
        if rest > _LEAST_REST:
            shares.append(("rest", "the rest", rest))
        bar = [element("span", class_=kind, style=f"flex-grow:{share:.4f}") for kind, _, share in shares]
        items = [
            element("li", element("span", class_=f"swatch {kind}"), f"{name} {100 * share:.1f} %")
            for kind, name, share in shares
        ]
        parts += [element("h3", run.name)] if len(runs) > 1 else []
        parts.append(element("div", *bar, class_="bar", aria_hidden="true"))
        parts.append(element("ul", *items, class_="shares"))
    return element("figure", *parts, class_="wide-figure") if len(parts) > 1 else Markup()


def speed_points(run: RunFolder) -> list[SpeedPoint]:
    """Return the median speed of a run on each number of ranks that it had."""
    found: dict[tuple[int, int], list[float]] = {}
    for record in run.training:
        hosts = run.hosts_at(record["step"])
        found.setdefault((len(hosts), len(set(hosts))), []).append(record["images_per_second"])
    # The first log point contains the warm-up of kernels and caches.
    return [
        SpeedPoint(run.name, ranks, nodes, median(values[1:] or values))
        for (ranks, nodes), values in found.items()
        if ranks
    ]


def scaling(runs: Sequence[RunFolder]) -> Markup:
    """Return images per second against ranks; nothing, if there is nothing to compare."""
    by_network: dict[tuple[str, int], list[SpeedPoint]] = {}
    for run in runs:
        network = str(run.settings.get("model.model")), int(run.settings.get("model.img_size", 0))
        by_network.setdefault(network, []).extend(speed_points(run))
    parts = []
    for (model, side), points in by_network.items():
        published = _PUBLISHED if model == _PUBLISHED_MODEL else ()
        if points and (published or len({point.ranks for point in points}) > 1):
            points.sort(key=lambda point: (point.ranks, point.images_per_second))
            parts.append(_scaling_of(f"{model}, {side} px", points, published))
    return joined(parts)


def _scaling_of(network: str, points: Sequence[SpeedPoint], published: Sequence[SpeedPoint]) -> Markup:
    base = [point for point in points if point.ranks == points[0].ranks][-1]
    efficiencies = [(point, point.of_rank / base.of_rank) for point in points]
    efficiencies += [(point, point.of_rank / published[0].of_rank) for point in published]
    rows = [
        [
            point.name,
            f"{point.ranks:,}",
            f"{point.nodes:,}",
            f"{point.images_per_second:,.0f}",
            f"{point.of_rank:,.1f}",
            f"{100 * efficiency:.1f} %",
        ]
        for point, efficiency in efficiencies
    ]
    most = max(point.ranks for point in [*points, *published])
    curves = [Curve("proportional", [(0, 0), (most, most * base.of_rank)], is_reference=True)]
    if published:
        places = [(point.ranks, point.images_per_second) for point in published]
        curves.append(Curve(published[0].name, places, is_marked=True, is_reference=True))
    fastest = {point.ranks: point.images_per_second for point in points}  # they ascend
    chart = Chart(
        title=f"Images per second against ranks: {network}",
        what=SPEED["images_per_second"],
        across="ranks",
        curves=[*curves, Curve("measured", list(fastest.items()), is_marked=True)],
    )
    head = ["Run", "Ranks", "Nodes", "Images/s", "Images/s and rank", "Efficiency"]
    caption = (
        f"Scaling of {network}. The curve has the fastest run of each number of ranks; the efficiency is "
        "relative to the smallest number."
    )
    figures = element("div", table(head, rows, caption=caption, numeric=True), class_="card")
    return element("div", draw(chart), figures, class_="charts")
