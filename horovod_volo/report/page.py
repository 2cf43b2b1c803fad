"""The page: its sections in page.html, with style sheet and script inside. It is one file, without requests.

A policy in its head forbids requests, so that a mistake here cannot make one either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from string import Template

from horovod_volo.report.curves import evaluation_chart, grouped, term_charts, training_chart
from horovod_volo.report.markup import Markup, element, escaped, folded, joined, table
from horovod_volo.report.quantities import AVERAGED, MAIN_SCORES, SPEED, TIME_PARTS, TRAINING, quantity
from horovod_volo.report.run_folder import Record, RunFolder
from horovod_volo.report.speed import scaling, speed
from horovod_volo.report.tables import environment, recipe, summary
from horovod_volo.report.worst_classes import worst_classes

_PLACES = ("step", "epoch", "images_seen", "images", "hours")
_MAIN_METRICS = ("top1", "top5", "loss", "miou", "pixel_accuracy", "class_accuracy", "ap", "ap50", "ap75")


def build_page(runs: Sequence[RunFolder], data_dir: str = "") -> str:
    """Return the page of runs; `data_dir` is where their data is now, if it has moved."""
    contents = {
        "At a glance": summary(runs),
        "Quality on held-out images": _quality(runs),
        "Training": _training(runs),
        "Speed": speed(runs),
        "Scaling": scaling(runs),
        "Worst classes": worst_classes(runs, data_dir),
        "Environment": environment(runs),
        "Recipe": recipe(runs),
    }
    links, sections = [], []
    for heading, content in contents.items():
        if content:
            anchor = heading.lower().replace(" ", "-")
            links.append(element("li", element("a", heading, href=f"#{anchor}")))
            title = element("h2", heading, id=anchor)
            sections.append(element("section", title, content, aria_labelledby=anchor))
    names = ", ".join(run.name for run in runs)
    return Template(_resource("page.html")).substitute(
        title=escaped(f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs: {names}"),
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        links=joined(links),
        sections=joined(sections),
        style=_resource("page.css"),
        script=_resource("page.js"),
    )


def _resource(name: str) -> str:
    return files("horovod_volo.report").joinpath(name).read_text(encoding="utf-8")


def _quality(runs: Sequence[RunFolder]) -> Markup:
    """Return the metrics on held-out images."""
    found = _further_keys((record for run in runs for record in run.evaluations), [*_PLACES, "bad_samples"])
    if not found:
        return element("p", "There is no evaluation yet.")
    main = [key for key in _MAIN_METRICS if key in found]
    others = [key for key in found if key not in main]
    charts = []
    for key in main:
        charts.append(evaluation_chart(runs, key))
        if key in MAIN_SCORES:
            charts.append(evaluation_chart(runs, key, "hours"))
    further = grouped([evaluation_chart(runs, key) for key in others])
    latest = _latest_evaluation(runs, [*main, *others, "images", "bad_samples"])
    return joined([grouped([*charts, latest]), folded("Further metrics", further) if further else ""])


def _latest_evaluation(runs: Sequence[RunFolder], keys: Sequence[str]) -> Markup:
    """Return these metrics of the latest evaluation of each run as a table."""
    latest = [(run.name, run.evaluations[-1]) for run in runs if run.evaluations]
    head = ["Metric", *(f"{name}, step {record['step']:,.0f}" for name, record in latest)]
    rows = []
    for key in keys:
        what = quantity(key)
        title = "Damaged images left out" if key == "bad_samples" else what.title
        for name, row in ((key, title), (AVERAGED + key, f"{title}, averaged weights")):
            cells = [what.written(record[name]) if name in record else "" for _, record in latest]
            rows += [[row, *cells]] if any(cells) else []
    return element("div", table(head, rows, caption="The latest evaluation", numeric=True), class_="card")


def _training(runs: Sequence[RunFolder]) -> Markup:
    """Return the losses, the learning rate and what else the update depends on."""
    known = [*_PLACES, *TRAINING, *SPEED, *TIME_PARTS, "loss", "lr"]
    found = _further_keys((record for run in runs for record in run.training), known)
    terms = [key for key in found if key.endswith("_loss")]
    others = ["lr", *TRAINING, *(key for key in found if key not in terms)]
    losses = [training_chart(runs, "loss"), training_chart(runs, "loss", "hours"), *term_charts(runs, terms)]
    return grouped([*losses, *map(partial(training_chart, runs), others)])


def _further_keys(records: Iterable[Record], known: Sequence[str]) -> list[str]:
    """Return the keys of records that are not known, in their order; those of averaged weights left out."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key not in known and not key.startswith(AVERAGED)]
