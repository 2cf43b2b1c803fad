"""Images per second against the number of ranks, in the form of the published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from horovod_volo.report.chart import Chart, Curve, draw
from horovod_volo.report.markup import Markup, element, joined, table
from horovod_volo.report.run_files import RunFiles


@dataclass(frozen=True)
class SpeedPoint:
    """The speed of a run on a number of ranks."""

    name: str  # of the run
    ranks: int
    nodes: int
    images_per_second: float

    @property
    def of_rank(self) -> float:
        """Return the images per second of one rank."""
        return self.images_per_second / self.ranks

    def row(self, base: SpeedPoint) -> list[str]:
        """Return the cells of a table, with the efficiency relative to another point."""
        efficiency = f"{100 * self.of_rank / base.of_rank:.1f} %"
        speeds = [f"{self.images_per_second:,.0f}", f"{self.of_rank:,.1f}"]
        return [self.name, f"{self.ranks:,}", f"{self.nodes:,}", *speeds, efficiency]


# Of NVIDIA's article on VOLO-D5 on A100, eight to a node.
PUBLISHED_MODEL = "volo_d5"
PUBLISHED = (SpeedPoint("published, A100", 8, 1, 500.0), SpeedPoint("published, A100", 40, 5, 2100.0))


def scaling(runs: Sequence[RunFiles]) -> Markup:
    """Return images per second against ranks; nothing, if there is nothing to compare."""
    by_model: dict[tuple[str, int], list[SpeedPoint]] = {}
    for run in runs:
        network = str(run.setting("model", "model")), int(run.setting("model", "img_size") or 0)
        by_model.setdefault(network, []).extend(speed_points(run))
    parts = []
    for (model, side), points in by_model.items():
        published = PUBLISHED if model == PUBLISHED_MODEL else ()
        if points and (published or len({point.ranks for point in points}) > 1):
            points.sort(key=lambda point: (point.ranks, point.images_per_second))
            parts.append(_scaling_of(f"{model}, {side} px", points, published))
    return joined(parts)


def speed_points(run: RunFiles) -> list[SpeedPoint]:
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


def _scaling_of(what: str, points: Sequence[SpeedPoint], published: Sequence[SpeedPoint]) -> Markup:
    base = [point for point in points if point.ranks == points[0].ranks][-1]
    rows = [point.row(base) for point in points] + [point.row(published[0]) for point in published]
    most = max(point.ranks for point in [*points, *published])
    reference = [Curve("proportional", [(0, 0), (most, most * base.of_rank)])]
    if published:
        places = [(point.ranks, point.images_per_second) for point in published]
        reference.append(Curve(published[0].name, places, is_marked=True))
    fastest = {point.ranks: point.images_per_second for point in points}  # they ascend
    chart = Chart(
        title=f"Images per second against ranks: {what}",
        unit="images/s",
        across="ranks",
        curves=[Curve("measured", list(fastest.items()), is_marked=True)],
        written=lambda value: f"{value:,.0f} images/s",
        from_zero=True,
        is_whole=True,
        reference=reference,
    )
    head = ["Run", "Ranks", "Nodes", "Images/s", "Images/s and rank", "Efficiency"]
    caption = (
        f"Scaling of {what}. The curve has the fastest run of each number of ranks; the efficiency is "
        "relative to the smallest number."
    )
    figures = element("div", table(head, rows, caption=caption, numeric=True), class_="card")
    return element("div", draw(chart), figures, class_="charts")
