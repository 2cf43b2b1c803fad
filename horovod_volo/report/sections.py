"""The sections of a report with curves: the quality on held-out images, training, and speed."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_volo.report.curves import Charts, further_keys, mean_over_time
from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.quantities import AVERAGED, SCORES, TIME_PARTS, quantity
from horovod_volo.report.run_files import RunFiles

_PLACES = ("step", "epoch", "images_seen", "images", "hours")
_MAIN_METRICS = ("top1", "top5", "loss", "miou", "pixel_accuracy", "class_accuracy", "ap", "ap50", "ap75")
_LEAST_REST = 0.0005  # of the time
_TRAINING = ("gradient_norm", "loss_scale", "skipped_steps", "bad_samples")
_SPEED = (
    "images_per_second",
    "data_wait",
    "mfu",
    "model_tflops",
    "device_memory_gib",
    "device_allocated_gib",
    "host_memory_gib",
    "step_seconds_min",
    "step_seconds_median",
    "step_seconds_max",
    "slowest_rank",
)


def quality(charts: Charts) -> Markup:
    """Return the metrics on held-out images."""
    runs = charts.runs
    records = [record for run in runs for record in run.evaluations]
    if not records:
        return element("p", "There is no evaluation yet.")
    found = further_keys(records, [*_PLACES, "bad_samples"])
    main = [key for key in _MAIN_METRICS if key in found]
    shown = []
    for key in main:
        shown.append(charts.of_key(key, "evaluations"))
        if key in SCORES and charts.has_hours:
            shown.append(charts.of_key(key, "evaluations", "hours"))
    others = [charts.of_key(key, "evaluations") for key in found if key not in main]
    further = folded("Further metrics", charts.group(*others)) if any(others) else Markup()
    latest = _latest(runs, [*main, *(key for key in found if key not in main)])
    return joined([charts.group(*shown, latest), further])


def training(charts: Charts) -> Markup:
    """Return the losses, the learning rate and what else the update depends on."""
    records = [record for run in charts.runs for record in run.training]
    parts = list(dict.fromkeys(key for run in charts.runs for key in run.loss_parts))
    shown = [charts.of_key("loss")]
    if charts.has_hours:
        shown.append(charts.of_key("loss", across="hours"))
    shown += [*charts.of_parts(parts), charts.of_key("lr")]
    shown += map(charts.of_key, _TRAINING)
    known = [*_PLACES, *_TRAINING, *_SPEED, *TIME_PARTS, *parts, "loss", "lr"]
    shown += map(charts.of_key, further_keys(records, known))
    return charts.group(*shown)


def speed(charts: Charts) -> Markup:
    """Return the throughput, where the time went, and memory."""
    return joined([charts.group(*map(charts.of_key, _SPEED)), _time_shares(charts.runs)])


def _latest(runs: Sequence[RunFiles], keys: Sequence[str]) -> Markup:
    """Return all metrics of the latest evaluation of each run."""
    latest = [(run, run.evaluations[-1]) for run in runs if run.evaluations]
    head = ["Metric", *(f"{run.name}, step {record['step']:,.0f}" for run, record in latest)]
    rows = []
    for key in [*keys, "images", "bad_samples"]:
        for name, title in ((key, _title(key)), (AVERAGED + key, f"{_title(key)}, averaged weights")):
            if any(name in record for _, record in latest):
                cells = (
                    quantity(key).written(record[name]) if name in record else "" for _, record in latest
                )
                rows.append([title, *cells])
    return element("div", table(head, rows, caption="The latest evaluation", numeric=True), class_="card")


def _title(key: str) -> str:
    named = {"images": "Images", "bad_samples": "Damaged images left out", "loss": "Loss"}
    return named.get(key) or quantity(key).title


def _time_shares(runs: Sequence[RunFiles]) -> Markup:
    """Return where the time of each run went, as bars."""
    rows = [(run.name, shares) for run in runs if (shares := _shares_of(run))]
    if not rows:
        return Markup()
    bars = [part for name, shares in rows for part in _bar(name if len(runs) > 1 else "", shares)]
    caption = element("figcaption", "Where the time of training went")
    return element("figure", caption, *bars, class_="wide-figure")


def _shares_of(run: RunFiles) -> list[tuple[str, str, float]]:
    """Return the parts of the time: the class of the style sheet, the name and the fraction."""
    means = [
        (f"b{number}", name, mean_over_time(run, key))
        for number, (key, name) in enumerate(TIME_PARTS.items())
    ]
    shares = [(kind, name, mean) for kind, name, mean in means if mean is not None]
    if not shares and (waited := mean_over_time(run, "data_wait")) is not None:
        shares = [("b2", TIME_PARTS["time_data"], waited)]
    rest = 1 - sum(share for _, _, share in shares)
    return [*shares, ("rest", "the rest", rest)] if shares and rest > _LEAST_REST else shares


def _bar(name: str, shares: Sequence[tuple[str, str, float]]) -> list[Markup]:
    bar = [
        element("span", class_=kind, style=f"flex-grow:{max(0.0, share):.4f}") for kind, _, share in shares
    ]
    said = [
        element("li", element("span", class_=f"swatch {kind}"), f"{what} {100 * share:.1f} %")
        for kind, what, share in shares
    ]
    parts = [element("div", *bar, class_="bar", aria_hidden="true"), element("ul", *said, class_="shares")]
    return [element("h3", name), *parts] if name else parts
