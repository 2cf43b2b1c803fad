"""The charts of a report: which numbers of metrics.jsonl are drawn, and against what.

Numbers that never change are no charts, but sentences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from horovod_volo.report.chart import Chart, Curve, Point, draw, smoothed
from horovod_volo.report.markup import Markup, element, joined
from horovod_volo.report.quantities import AVERAGED, TIME_PARTS, Quantity, quantity
from horovod_volo.report.run_files import Record, RunFiles

Across = Literal["epochs", "steps", "hours"]
Kind = Literal["training", "evaluations"]

_SMOOTHED_FROM = 60  # points
_LOG_RATIO, _LOG_RATIO_OF_PEAKS = 50, 5
_NOT_SMOOTHED = (
    "lr",
    "loss_scale",
    "skipped_steps",
    "bad_samples",
    "host_memory_gib",
    "device_memory_gib",
    "device_allocated_gib",
    "slowest_rank",
)
_LEAST_WAIT = 1e-4  # as a fraction of the time; a smaller one is rounded too coarsely in metrics.jsonl


@dataclass(frozen=True)
class Line:
    """The values of a key in a run, as points of a curve."""

    run: RunFiles
    key: str
    label: str
    color: int
    points: list[Point]

    @property
    def is_constant(self) -> bool:
        """Return whether there is nothing to draw."""
        return len({y for _, y in self.points}) == 1


@dataclass(frozen=True)
class Charts:
    """Draws the charts of runs."""

    runs: Sequence[RunFiles]

    @property
    def epochs(self) -> Across:
        """Return what charts are drawn against: epochs, or steps if the length of an epoch is not known."""
        return "epochs" if all(run.steps_per_epoch for run in self.runs) else "steps"

    @property
    def has_hours(self) -> bool:
        """Return whether the runs have recorded the time since their start."""
        return all(any("hours" in record for record in run.training) for run in self.runs)

    def group(self, *parts: Markup) -> Markup:
        """Return charts beside each other and, behind them, the sentences."""
        words = [part for part in parts if part.startswith("<p")]
        charts = [part for part in parts if part and part not in words]
        grid = element("div", *charts, class_="charts") if charts else Markup()
        return joined([grid, *words])

    def of_key(self, key: str, kind: Kind = "training", across: Across | None = None) -> Markup:
        """Return the chart of a key: one curve for each run, and one for its averaged weights."""
        keys = [key, f"{AVERAGED}{key}"] if kind == "evaluations" else [key]
        across = across or self.epochs
        lines = self._lines([(name, self._label_of(name, keys)) for name in keys], kind, across)
        title = quantity(key).title
        if kind == "evaluations" and key == "loss":
            title = "Loss on held-out images"
        return self._drawn(lines, quantity(key), title, across, kind)

    def of_parts(self, keys: Sequence[str]) -> list[Markup]:
        """Return the terms of the loss: in one chart for one run, else a chart for each."""
        if len(self.runs) > 1:
            return [self.of_key(key) for key in keys]
        named = [(key, quantity(key).title.lower()) for key in keys]
        lines = self._lines(named, "training", self.epochs)
        title = "Terms of the loss, before weighting"
        return [self._drawn(lines, quantity("loss"), title, self.epochs, "training")]

    def _label_of(self, key: str, keys: Sequence[str]) -> str:
        """Return how a key is told from its sibling; nothing, if no run has both."""
        both = any(all(any(name in each for each in run.evaluations) for name in keys) for run in self.runs)
        if len(keys) < 2 or not both:
            return ""
        if not key.startswith(AVERAGED):
            return "raw" if len(self.runs) == 1 else ""
        return "averaged"

    def _lines(self, keys: Sequence[tuple[str, str]], kind: Kind, across: Across) -> list[Line]:
        several = len(self.runs) > 1
        lines = []
        for number, run in enumerate(self.runs):
            for place, (key, label) in enumerate(keys):
                points = points_of(run, key, kind, across)
                name = f"{run.name} {label}".strip() if several else label
                if points:
                    lines.append(Line(run, key, name, number if several else place, points))
        return lines

    def _drawn(self, lines: Sequence[Line], what: Quantity, title: str, across: Across, kind: Kind) -> Markup:
        if not lines:
            return Markup()
        if all(line.is_constant for line in lines):
            return _in_words(lines, what, title, across) if across == self.epochs else Markup()
        several = len(self.runs) > 1
        curves = [
            _curve(line, what, kind, is_dashed=several and line.key.startswith(AVERAGED)) for line in lines
        ]
        note = "bold: running mean; thin: each log point" if any(curve.raw for curve in curves) else ""
        return draw(
            Chart(
                title=title,
                unit=what.unit if what.form != "percent" else "%",
                across=across,
                curves=curves,
                written=lambda value: _written_scaled(what, value),
                from_zero=what.from_zero,
                is_log=_is_log(what, lines),
                note=note,
            )
        )


def points_of(run: RunFiles, key: str, kind: Kind, across: Across) -> list[Point]:
    """Return the values of a key."""
    records = run.training if kind == "training" else run.evaluations
    return [
        (x, record[key])
        for record in records
        if key in record and (x := _across(run, record, across)) is not None
    ]


def hours_at(run: RunFiles, step: float) -> float | None:
    """Return the hours since the start of a run at its last log point up to a step."""
    timed = [(record["step"], record["hours"]) for record in run.training if "hours" in record]
    place = bisect_right(timed, step, key=lambda pair: pair[0])
    return timed[place - 1][1] if place else None


def weights_of(run: RunFiles) -> list[tuple[Record, float]]:
    """Return the records of training, each with the images since the one before it over its images/s."""
    before = {"images_seen": 0.0}
    weighted = []
    for earlier, record in pairwise([before, *run.training]):
        images = record.get("images_seen", 0.0) - earlier.get("images_seen", 0.0)
        speed = record["images_per_second"]
        weighted.append((record, max(0.0, images) / speed if speed > 0 else 0.0))
    return weighted


def mean_over_time(run: RunFiles, key: str) -> float | None:
    """Return the mean of a key over the time of training, of TIME_PARTS over wall time; None without it."""
    found = [
        (record[key], seconds * (_wall_ratio(record) if key in TIME_PARTS else 1.0))
        for record, seconds in weights_of(run)
        if key in record
    ]
    total = sum(seconds for _, seconds in found)
    return sum(value * seconds for value, seconds in found) / total if total else None


def _wall_ratio(record: Record) -> float:
    """Return wall time, which includes checkpoints between epochs, over the seconds of training."""
    # The same wait for data is recorded as a fraction of each of the two.
    of_wall = record.get("time_data", 0.0)
    return max(1.0, record.get("data_wait", 0.0) / of_wall) if of_wall >= _LEAST_WAIT else 1.0


def _across(run: RunFiles, record: Record, across: Across) -> float | None:
    if across == "hours":
        return record["hours"] if "hours" in record else hours_at(run, record["step"])
    return record["step"] / run.steps_per_epoch if across == "epochs" else record["step"]


def _curve(line: Line, what: Quantity, kind: Kind, *, is_dashed: bool) -> Curve:
    points = [(x, what.scaled(y)) for x, y in line.points]
    is_smoothed = kind == "training" and line.key not in _NOT_SMOOTHED and len(points) >= _SMOOTHED_FROM
    return Curve(
        label=line.label,
        points=smoothed(points) if is_smoothed else points,
        color=line.color,
        is_dashed=is_dashed,
        is_marked=kind == "evaluations" and len(points) <= 40,
        raw=points if is_smoothed else (),
    )


def _written_scaled(what: Quantity, value: float) -> str:
    return what.written(value / 100 if what.form == "fraction" else value)


def _is_log(what: Quantity, lines: Sequence[Line]) -> bool:
    values = [y for line in lines for _, y in line.points]
    if not what.may_be_log or min(values) <= 0:
        return False
    if what.form == "rate":  # a schedule is known by its shape, which is that of a linear axis
        peaks = [max(y for _, y in line.points) for line in lines]
        return max(peaks) >= _LOG_RATIO_OF_PEAKS * min(peaks)
    return max(values) >= _LOG_RATIO * min(values)


def _in_words(lines: Sequence[Line], what: Quantity, title: str, across: Across) -> Markup:
    """Say what does not change."""
    values = {line.points[0][1] for line in lines}
    if values == {0} and what.zero:
        text = f"{what.zero[0].upper()}{what.zero[1:]}."
    elif len(values) == 1 and len(lines[0].points) > 1:
        text = f"{title}: {what.written(values.pop())} throughout."
    else:
        said = (f"{line.label} {_one_value(line, what, across)}".strip() for line in lines)
        text = f"{title}: {', '.join(said)}."
    return element("p", text, class_="constant")


def _one_value(line: Line, what: Quantity, across: Across) -> str:
    x, y = line.points[0]
    unit = across.removesuffix("s")
    return what.written(y) + (f" ({unit} {x:.4g})" if len(line.points) == 1 else " throughout")


def further_keys(records: Iterable[Record], known: Iterable[str]) -> list[str]:
    """Return the keys of records that are not known, in their order; those of averaged weights left out."""
    keys = dict.fromkeys(key for record in records for key in record)
    left_out = set(known)
    return [key for key in keys if key not in left_out and not key.startswith(AVERAGED)]
