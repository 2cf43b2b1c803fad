"""Images per second against the number of ranks, in the form of the published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from horovod_volo.report.chart import Chart, Curve, draw
from horovod_volo.report.markup import Markup, element, joined, table
from horovod_volo.report.run_files import RunFiles

# Of NVIDIA's article on VOLO-D5 on A100, eight to a node: ranks and images per second.
PUBLISHED_MODEL = "volo_d5"
PUBLISHED = ((8, 500.0), (40, 2100.0))
_PUBLISHED_NAME, _PUBLISHED_OF_RANK = "published, A100", 500 / 8


@dataclass(frozen=True)
class SpeedPoint:
    """The speed of a run on a number of ranks."""

    run: RunFiles
    ranks: int
    nodes: int
    images_per_second: float

    @property
    def of_rank(self) -> float:
        """Return the images per second of one rank."""
        return self.images_per_second / self.ranks


def scaling(runs: Sequence[RunFiles]) -> Markup:
    """Return images per second against ranks; nothing, if there is nothing to compare."""
    by_model: dict[tuple[str, int], list[SpeedPoint]] = {}
    for run in runs:
        network = str(run.setting("model", "model")), int(run.setting("model", "img_size") or 0)
        by_model.setdefault(network, []).extend(speed_points(run))
    parts = []
    for (model, side), points in by_model.items():
        is_published = model == PUBLISHED_MODEL
        if is_published or len({point.ranks for point in points}) > 1:
            parts += _scaling_of(f"{model}, {side} px", sorted(points, key=_ranks_of), is_published)
    return joined(parts)


def speed_points(run: RunFiles) -> list[SpeedPoint]:
    """Return the median speed of a run on each number of ranks that it had."""
    found: dict[tuple[int, int], list[float]] = {}
    for record in run.training:
        hosts = run.hosts_at(record["step"])
        found.setdefault((len(hosts), len(set(hosts))), []).append(record["images_per_second"])
    # The first log point contains the warm-up of kernels and caches.
    return [
        SpeedPoint(run, ranks, nodes, median(values[1:] or values))
        for (ranks, nodes), values in found.items()
        if ranks
    ]


def _row(name: str, ranks: int, nodes: int, images_per_second: float, base: float) -> list[str]:
    of_rank = images_per_second / ranks
    efficiency = f"{100 * of_rank / base:.1f} %"
    return [name, f"{ranks:,}", f"{nodes:,}", f"{images_per_second:,.0f}", f"{of_rank:,.1f}", efficiency]


def _ranks_of(point: SpeedPoint) -> tuple[int, float]:
    return point.ranks, point.images_per_second


def _scaling_of(what: str, points: Sequence[SpeedPoint], is_published: bool) -> list[Markup]:
    base = [point for point in points if point.ranks == points[0].ranks][-1]
    rows = [
        _row(point.run.name, point.ranks, point.nodes, point.images_per_second, base.of_rank)
        for point in points
    ]
    most = max([point.ranks for point in points] + [ranks for ranks, _ in PUBLISHED] * is_published)
    reference = [Curve("proportional", [(0, 0), (most, most * base.of_rank)])]
    if is_published:
        reference.append(Curve(_PUBLISHED_NAME, list(PUBLISHED), is_marked=True))
        rows += [
            _row(_PUBLISHED_NAME, ranks, ranks // 8, each, _PUBLISHED_OF_RANK) for ranks, each in PUBLISHED
        ]
    fastest = {point.ranks: point.images_per_second for point in points}  # they ascend
    measured = Curve("measured", list(fastest.items()), is_marked=True)
    chart = Chart(
        title=f"Images per second against ranks: {what}",
        unit="images/s",
        across="ranks",
        curves=[measured],
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
    return [element("div", draw(chart), figures, class_="charts")]
