"""The page: its sections in page.html, with style sheet and script inside. It is one file, without requests.

A policy in its head forbids requests, so that a mistake here cannot make one either.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.resources import files
from string import Template
from typing import Any

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.data.reading import thumbnail
from horovod_volo.engine.accuracy import Confusions
from horovod_volo.monitor.pictures import inlined_jpeg
from horovod_volo.report.curves import evaluation_chart, grouped, scaling, speed, training_chart
from horovod_volo.report.markup import Markup, element, escaped, folded, joined
from horovod_volo.report.quantities import AVERAGED, MAIN_SCORES, SPEED, TIME_PARTS, TRAINING
from horovod_volo.report.run_folder import Record, RunFolder
from horovod_volo.report.tables import environment, recipe, summary

_PLACES = ("step", "epoch", "images_seen", "hours")
_MAIN_METRICS = ("top1", "top5", "loss", "miou", "pixel_accuracy", "class_accuracy", "ap", "ap50", "ap75")
_THUMBNAIL_SIDE = 112  # pixels


def build_page(runs: Sequence[RunFolder], data_dir: str = "") -> str:
    """Return the page of runs; `data_dir` is where their data is now, if it has moved."""
    contents = {
        "At a glance": summary(runs),
        "Quality on held-out images": _quality(runs),
        "Training": _training(runs),
        "Speed": speed(runs),
        "Scaling": scaling(runs),
        "Worst classes": _worst_classes(runs, data_dir),
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
    found = _further_keys((record for run in runs for record in run.evaluations), _PLACES)
    main = [key for key in _MAIN_METRICS if key in found]
    others = [key for key in found if key not in main]
    charts = []
    for key in main:
        charts.append(evaluation_chart(runs, key))
        if key in MAIN_SCORES:
            charts.append(evaluation_chart(runs, key, "hours"))
    further = grouped([evaluation_chart(runs, key) for key in others])
    return joined([grouped(charts), folded("Further metrics", further) if further else ""])


def _training(runs: Sequence[RunFolder]) -> Markup:
    """Return the losses, the learning rate and what else the update depends on."""
    known = [*_PLACES, *TRAINING, *SPEED, *TIME_PARTS, "loss", "lr"]
    found = _further_keys((record for run in runs for record in run.training), known)
    found.sort(key=lambda key: not key.endswith("_loss"))  # the terms of the loss first
    charts = [training_chart(runs, key) for key in ("loss", *found, "lr", *TRAINING)]
    return grouped([charts[0], training_chart(runs, "loss", "hours"), *charts[1:]])


def _further_keys(records: Iterable[Record], known: Sequence[str]) -> list[str]:
    """Return the keys of records that are not known, in their order; those of averaged weights left out."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key not in known and not key.startswith(AVERAGED)]


def _worst_classes(runs: Sequence[RunFolder], data_dir: str) -> Markup:
    """Return the worst classes of each run; nothing, if no run has recorded them."""
    parts = [(run.name, _worst_of_run(run, data_dir)) for run in runs if run.confusions]
    shown = [part if len(runs) == 1 else folded(name, part) for name, part in parts]
    introduction = "Under each image is what it was taken for, and with which probability."
    return joined([element("p", introduction), *shown]) if shown else Markup()


def _worst_of_run(run: RunFolder, data_dir: str) -> Markup:
    found = run.confusions
    about = (
        f"At step {found['step']:,}: {found['top1']:.2f} % of {found['images']:,} held-out images of "
        f"{found['classes']:,} classes were right."
    )
    with ExitStack() as stack:
        images = _open_images(run, data_dir)
        if images is not None:
            stack.enter_context(closing(images))
        elif found["worst"]:
            about += " The data folder does not have these images: where they lay is said instead. "
            about += "--data-dir names the folder where the data is now."
        cards = [_card(row, images) for row in found["worst"]]
    return joined([element("p", about), element("div", *cards, class_="classes")])


def _open_images(run: RunFolder, data_dir: str) -> Catalog | None:
    """Return the held-out images of a run; None if they are not there."""
    setting = run.settings.get
    held_out = HeldOut(setting("data.val_split", ""), setting("data.val_share", 0.0), setting("run.seed", 0))
    try:
        catalog = build_catalog(data_dir or setting("data.data_dir", ""), "val", None, held_out)
    except UserError:
        return None
    if data_dir or catalog.digest == run.confusions["image_list"]:
        return catalog
    catalog.close()
    return None


def _card(row: Confusions, images: Catalog | None) -> Markup:
    accuracy = 100 * row["right"] / row["images"]
    most = f"{row['mistaken']} taken for {row['mistaken_for']}" if row["mistaken"] else "none right"
    figures = []
    for wrong in row["wrong"]:
        probability = element("small", f"{100 * wrong['probability']:.0f} %")
        caption = element("figcaption", wrong["taken_for"], probability)
        figures.append(element("figure", _picture(wrong, images), caption))
    text = element("p", f"{accuracy:.1f} %: {row['right']} of {row['images']} right, {most}")
    pictures = element("div", *figures, class_="wrong" if images is not None else "wrong places")
    return element("div", element("h3", row["name"]), text, pictures, class_="class")


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
