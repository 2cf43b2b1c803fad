"""The page: its sections in page.html, with style sheet and script inside. It is one file, without requests.

A policy in its head forbids requests, so that a mistake here cannot make one either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from string import Template
from typing import Any

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.data.reading import thumbnail
from horovod_volo.engine.accuracy import Confusions
from horovod_volo.monitor.pictures import inlined_jpeg
from horovod_volo.report.curves import evaluation_chart, grouped, scaling, speed, term_charts, training_chart
from horovod_volo.report.markup import Markup, element, escaped, folded, joined, table
from horovod_volo.report.quantities import AVERAGED, MAIN_SCORES, SPEED, TIME_PARTS, TRAINING, quantity
from horovod_volo.report.run_folder import Record, RunFolder
from horovod_volo.report.tables import environment, recipe, summary

_PLACES = ("step", "epoch", "images_seen", "images", "hours")
_MAIN_METRICS = ("top1", "top5", "loss", "miou", "pixel_accuracy", "class_accuracy", "ap", "ap50", "ap75")
_THUMBNAIL_SIDE = 112  # pixels
_OPEN, _OPEN_OF_SEVERAL = 8, 3  # classes that are shown without a click
_INTRODUCTION = (
    "The classes with the lowest accuracy, and images of them that were wrong with the highest probability. "
    "Under each image is what it was taken for."
)


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


def worst_classes(runs: Sequence[RunFolder], data_dir: str) -> Markup:
    """Return the worst classes of each run; nothing, if no run has recorded them."""
    parts = [_worst_of_run(run, data_dir, several=len(runs) > 1) for run in runs if run.confusions]
    return joined([element("p", _INTRODUCTION), *parts]) if parts else Markup()


def _worst_of_run(run: RunFolder, data_dir: str, *, several: bool) -> Markup:
    head = element("h3", run.name) if several else ""
    about, rows = _about_confusions(run), run.confusions["worst"]
    if not rows:
        return joined([head, element("p", f"{about} Every image was right.")])
    images, problem = _open_images(run, data_dir)
    with ExitStack() as stack:
        if images is not None:
            stack.enter_context(closing(images))
        cards = [_card(row, images, "h4" if several else "h3") for row in rows]
    most = _OPEN_OF_SEVERAL if several else _OPEN
    shown, more = (element("div", *part, class_="classes") for part in (cards[:most], cards[most:]))
    rest = folded(f"{len(cards) - most} more classes", more) if cards[most:] else ""
    note = element("p", problem, class_="note") if problem else ""
    return joined([head, element("p", about), note, shown, rest])


def _about_confusions(run: RunFolder) -> str:
    found = run.confusions
    record = next((each for each in run.evaluations if each["step"] == found["step"]), {})
    is_averaged = record.get("top1") != found["top1"] and record.get(f"{AVERAGED}top1") == found["top1"]
    weights = ", with averaged weights" if is_averaged else ""
    return (
        f"At step {found['step']:,}{weights}: {found['top1']:.2f} % of {found['images']:,} held-out images "
        f"of {found['classes']:,} classes were right."
    )


def _open_images(run: RunFolder, data_dir: str) -> tuple[Catalog | None, str]:
    """Return the held-out images of a run, or None and why they are not shown."""
    folder = data_dir or run.settings.get("data.data_dir", "")
    setting = run.settings.get
    held_out = HeldOut(setting("data.val_split", ""), setting("data.val_share", 0.0), setting("run.seed", 0))
    remedy = "Where they lay is said instead. --data-dir names the folder where the data is now."
    try:
        catalog = build_catalog(folder, "val", None, held_out)
    except UserError:
        return None, f"The images are not shown: there are none in {folder or 'an unknown folder'}. {remedy}"
    if data_dir or catalog.digest == run.confusions["image_list"]:
        return catalog, ""
    catalog.close()
    return None, f"The images are not shown: those in {folder} are others than the run evaluated. {remedy}"


def _card(row: Confusions, images: Catalog | None, heading: str) -> Markup:
    accuracy = 100 * row["right"] / row["images"]
    most = f"{row['mistaken']} taken for {row['mistaken_for']}" if row["mistaken"] else "none right"
    figures = []
    for wrong in row["wrong"]:
        probability = element("small", f"{100 * wrong['probability']:.0f} %")
        caption = element("figcaption", wrong["taken_for"], probability)
        figures.append(element("figure", _picture(wrong, images), caption))
    told = element("p", f"{accuracy:.1f} %: {row['right']} of {row['images']} right, {most}")
    pictures = element("div", *figures, class_="wrong" if images is not None else "wrong places")
    return element("div", element(heading, row["name"]), told, pictures, class_="class")


def _picture(wrong: dict[str, Any], images: Catalog | None) -> Markup:
    """Return a small picture; where it lay, if it has gone, or is another one than was evaluated."""
    index, place = wrong["index"], element("span", wrong["location"], class_="place")
    try:
        if images is None or index >= len(images) or images.name(index) != wrong["name"]:
            return place
        small = thumbnail(images, index, (_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    except BadSampleError:
        return place
    # The class that it was taken for is beside it.
    about = {"alt": wrong["name"], "title": wrong["location"]}
    return element("img", src=inlined_jpeg(small), **about, width=small.width, height=small.height)
