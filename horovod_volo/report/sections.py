"""The sections of a report with curves: the quality on held-out images, training, and speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horovod_volo.report.curves import Charts, mean_over_time
from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.quantities import AVERAGED, SCORES, SPEED, TIME_PARTS, TRAINING, quantity
from horovod_volo.report.run_files import Record, RunFiles

_PLACES = ("step", "epoch", "images_seen", "images", "hours")
_MAIN_METRICS = ("top1", "top5", "loss", "miou", "pixel_accuracy", "class_accuracy", "ap", "ap50", "ap75")
_LEAST_REST = 0.0005  # of the time


def quality(charts: Charts) -> Markup:
    """Return the metrics on held-out images."""
    records = [record for run in charts.runs for record in run.evaluations]
    if not records:
        return element("p", "There is no evaluation yet.")
    found = _further_keys(records, [*_PLACES, "bad_samples"])
    main = [key for key in _MAIN_METRICS if key in found]
    others = [key for key in found if key not in main]
    shown = []
    for key in main:
        shown.append(charts.of_key(key, "evaluations"))
        if key in SCORES and charts.has_hours:
            shown.append(charts.of_key(key, "evaluations", "hours"))
    further = charts.group(*(charts.of_key(key, "evaluations") for key in others))
    latest = _latest(charts.runs, [*main, *others, "images", "bad_samples"])
    return joined([charts.group(*shown, latest), folded("Further metrics", further) if further else ""])


def training(charts: Charts) -> Markup:
    """Return the losses, the learning rate and what else the update depends on."""
    records = [record for run in charts.runs for record in run.training]
    parts = list(dict.fromkeys(key for run in charts.runs for key in run.loss_parts))
    shown = [charts.of_key("loss")]
    if charts.has_hours:
        shown.append(charts.of_key("loss", across="hours"))
    further = _further_keys(records, [*_PLACES, *TRAINING, *SPEED, *TIME_PARTS, *parts, "loss", "lr"])
    shown += [*charts.of_parts(parts), *map(charts.of_key, ["lr", *TRAINING, *further])]
    return charts.group(*shown)


def speed(charts: Charts) -> Markup:
    """Return the throughput, where the time went, and memory."""
    return joined([charts.group(*map(charts.of_key, SPEED)), _time_shares(charts.runs)])


def _further_keys(records: Iterable[Record], known: Sequence[str]) -> list[str]:
    """Return the keys of records that are not known, in their order; those of averaged weights left out."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key not in known and not key.startswith(AVERAGED)]


def _latest(runs: Sequence[RunFiles], keys: Sequence[str]) -> Markup:
    """Return these metrics of the latest evaluation of each run."""
    latest = [(run.name, run.evaluations[-1]) for run in runs if run.evaluations]
    head = ["Metric", *(f"{name}, step {record['step']:,.0f}" for name, record in latest)]
    rows = []
    for key in keys:
        what = quantity(key)
        title = "Damaged images left out" if key == "bad_samples" else what.title
        for name, said in ((key, title), (AVERAGED + key, f"{title}, averaged weights")):
            values = [record.get(name) for _, record in latest]
            if values != [None] * len(latest):
                cells = ("" if value is None else what.written(what.scaled(value)) for value in values)
                rows.append([said, *cells])
    return element("div", table(head, rows, caption="The latest evaluation", numeric=True), class_="card")


def _time_shares(runs: Sequence[RunFiles]) -> Markup:
    """Return where the time of each run went, as bars."""
    parts = [element("figcaption", "Where the time of training went")]
    for run in runs:
        bar, said = [], []
        for kind, what, share in _shares_of(run):
            bar.append(element("span", class_=kind, style=f"flex-grow:{max(0.0, share):.4f}"))
            swatch = element("span", class_=f"swatch {kind}")
            said.append(element("li", swatch, f"{what} {100 * share:.1f} %"))
        if bar:
            parts += [element("h3", run.name)] if len(runs) > 1 else []
            parts.append(element("div", *bar, class_="bar", aria_hidden="true"))
            parts.append(element("ul", *said, class_="shares"))
    return element("figure", *parts, class_="wide-figure") if len(parts) > 1 else Markup()


def _shares_of(run: RunFiles) -> list[tuple[str, str, float]]:
    """Return the parts of the time: the class of the style sheet, the name and the fraction."""
    shares = [
        (f"b{number}", name, mean)
        for number, (key, name) in enumerate(TIME_PARTS.items())
        if (mean := mean_over_time(run, key)) is not None
    ]
    if not shares and (waited := mean_over_time(run, "data_wait")) is not None:
        shares = [("b2", TIME_PARTS["time_data"], waited)]
    rest = 1 - sum(share for _, _, share in shares)
    return [*shares, ("rest", "the rest", rest)] if shares and rest > _LEAST_REST else shares
