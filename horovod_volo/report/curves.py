"""The charts of metrics.jsonl: a curve for each run, or a sentence about numbers that never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod_volo.report.chart import Chart, Curve, draw, smoothed
from horovod_volo.report.markup import Markup, element, joined
from horovod_volo.report.quantities import AVERAGED, Quantity, quantity
from horovod_volo.report.run_folder import RunFolder

_SMOOTHED_FROM, _MARKED_TO = 60, 40  # points
_LOG_RATIO, _LOG_RATIO_OF_PEAKS = 50, 5


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
