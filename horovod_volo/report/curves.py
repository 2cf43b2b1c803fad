"""The charts of a report: which numbers of metrics.jsonl are drawn, and against what.

Numbers that never change are no charts, but sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from horovod_volo.report.chart import Chart, Curve, draw, smoothed
from horovod_volo.report.markup import Markup, element, joined
from horovod_volo.report.quantities import AVERAGED, TIME_PARTS, Quantity, quantity
from horovod_volo.report.run_files import Record, RunFiles

Across = Literal["epochs", "steps", "hours"]
Kind = Literal["training", "evaluations"]

_SMOOTHED_FROM, _MARKED_TO = 60, 40  # points
_LOG_RATIO, _LOG_RATIO_OF_PEAKS = 50, 5
_LEAST_WAIT = 1e-4  # as a fraction of the time; a smaller one is rounded too coarsely in metrics.jsonl


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
        labels = self._labels_of_weights(key) if kind == "evaluations" else {key: ""}
        title = quantity(key).title
        if kind == "evaluations" and key == "loss":
            title = "Loss on held-out images"
        return self._drawn(labels, quantity(key), title, kind, across or self.epochs)

    def of_parts(self, keys: Sequence[str]) -> list[Markup]:
        """Return the terms of the loss: in one chart for one run, else a chart for each."""
        if len(self.runs) > 1:
            return [self.of_key(key) for key in keys]
        labels = {key: quantity(key).title.lower() for key in keys}
        title = "Terms of the loss, before weighting"
        return [self._drawn(labels, quantity("loss"), title, "training", self.epochs)]

    def _labels_of_weights(self, key: str) -> dict[str, str]:
        """Return how raw and averaged weights are told apart; nothing, if no run has both."""
        keys = (key, f"{AVERAGED}{key}")
        both = any(all(any(name in each for each in run.evaluations) for name in keys) for run in self.runs)
        raw = "raw" if len(self.runs) == 1 else ""
        return dict(zip(keys, (raw, "averaged") if both else ("", ""), strict=True))

    def _drawn(
        self, labels: Mapping[str, str], what: Quantity, title: str, kind: Kind, across: Across
    ) -> Markup:
        """Return the chart of keys that have labels, or the sentence that says what does not change."""
        curves = self._curves(labels, what, kind, across)
        if not curves:
            return Markup()
        if all(len({y for _, y in curve.points}) == 1 for curve in curves):
            return _in_words(curves, what, title, across) if across == self.epochs else Markup()
        is_log = _is_log(what, curves)
        if kind == "training" and what.is_smoothed:
            curves = [smoothed(curve) if len(curve.points) >= _SMOOTHED_FROM else curve for curve in curves]
        note = "bold: running mean; thin: each log point" if any(curve.raw for curve in curves) else ""
        return draw(
            Chart(title, what.unit, across, curves, what.written, what.from_zero, is_log=is_log, note=note)
        )

    def _curves(self, labels: Mapping[str, str], what: Quantity, kind: Kind, across: Across) -> list[Curve]:
        several = len(self.runs) > 1
        curves = []
        for number, run in enumerate(self.runs):
            records = run.training if kind == "training" else run.evaluations
            for place, (key, label) in enumerate(labels.items()):
                points = [
                    (x, what.scaled(record[key]))
                    for record in records
                    if key in record and (x := _across(run, record, across)) is not None
                ]
                if points:
                    curve = Curve(
                        label=f"{run.name} {label}".strip() if several else label,
                        points=points,
                        color=number if several else place,
                        is_dashed=several and key.startswith(AVERAGED),
                        is_marked=kind == "evaluations" and len(points) <= _MARKED_TO,
                    )
                    curves.append(curve)
        return curves


def hours_at(run: RunFiles, step: float) -> float | None:
    """Return the hours since the start of a run at its last log point up to a step."""
    hours = [record["hours"] for record in run.training if "hours" in record and record["step"] <= step]
    return hours[-1] if hours else None


def mean_over_time(run: RunFiles, key: str) -> float | None:
    """Return the mean of a key over the time of training, of TIME_PARTS over wall time; None without it."""
    found = []
    seen = 0.0
    for record in run.training:
        images, seen = record.get("images_seen", 0.0) - seen, record.get("images_seen", 0.0)
        speed = record["images_per_second"]
        if key in record and speed > 0:
            seconds = max(0.0, images) / speed
            # Wall time includes checkpoints between epochs. A wait for data is recorded as a fraction of it,
            # and as one of the seconds of training.
            of_wall = record.get("time_data", 0.0)
            if key in TIME_PARTS and of_wall >= _LEAST_WAIT:
                seconds *= max(1.0, record.get("data_wait", 0.0) / of_wall)
            found.append((record[key] * seconds, seconds))
    total = sum(seconds for _, seconds in found)
    return sum(value for value, _ in found) / total if total else None


def _across(run: RunFiles, record: Record, across: Across) -> float | None:
    if across == "hours":
        return record["hours"] if "hours" in record else hours_at(run, record["step"])
    return record["step"] / run.steps_per_epoch if across == "epochs" else record["step"]


def _is_log(what: Quantity, curves: Sequence[Curve]) -> bool:
    values = [y for curve in curves for _, y in curve.points]
    if not what.may_be_log or min(values) <= 0:
        return False
    if what.form == "rate":  # a schedule is known by its shape, which is that of a linear axis
        peaks = [max(y for _, y in curve.points) for curve in curves]
        return max(peaks) >= _LOG_RATIO_OF_PEAKS * min(peaks)
    return max(values) >= _LOG_RATIO * min(values)


def _in_words(curves: Sequence[Curve], what: Quantity, title: str, across: Across) -> Markup:
    """Say what does not change."""
    said = []
    for curve in curves:
        x, y = curve.points[0]
        when = f" ({across.removesuffix('s')} {x:.4g})" if len(curve.points) == 1 else " throughout"
        said.append(f"{curve.label} {what.written(y)}{when}".strip())
    values = {curve.points[0][1] for curve in curves}
    text = f"{title}: {', '.join(said)}."
    if values == {0} and what.zero:
        text = f"{what.zero[0].upper()}{what.zero[1:]}."
    elif len(values) == 1 and len(curves[0].points) > 1:
        text = f"{title}: {what.written(values.pop())} throughout."
    return element("p", text, class_="constant")
