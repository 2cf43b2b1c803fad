"""The speed of runs: charts, where the time went, and images per second against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from horovod_volo.report.chart import Chart, Curve, draw
from horovod_volo.report.curves import grouped, training_chart
from horovod_volo.report.markup import Markup, element, joined, table
from horovod_volo.report.quantities import SPEED, TIME_PARTS
from horovod_volo.report.run_folder import RunFolder

_LEAST_WAIT = 1e-4  # as a fraction of the time; a smaller one is rounded too coarsely in metrics.jsonl
_LEAST_REST = 0.0005  # of the time


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
