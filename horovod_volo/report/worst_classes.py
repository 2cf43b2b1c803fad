"""The worst classes of a run, with small pictures of images that were wrong, where the data can be read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.engine.accuracy import Confusions
from horovod_volo.engine.pictures import thumbnail
from horovod_volo.monitor.pictures import inlined_jpeg
from horovod_volo.report.markup import Markup, element, folded, joined
from horovod_volo.report.quantities import AVERAGED
from horovod_volo.report.run_folder import RunFolder

_SIDE = 112  # pixels
_OPEN, _OPEN_OF_SEVERAL = 8, 3  # classes that are shown without a click

_INTRODUCTION = (
    "The classes with the lowest accuracy, and images of them that were wrong with the highest probability. "
    "Under each image is what it was taken for."
)


def worst_classes(runs: Sequence[RunFolder], data_dir: str) -> Markup:
    """Return the worst classes of each run; nothing, if no run has recorded them."""
    parts = [_of_run(run, data_dir, several=len(runs) > 1) for run in runs if run.confusions]
    return joined([element("p", _INTRODUCTION), *parts]) if parts else Markup()


def _of_run(run: RunFolder, data_dir: str, *, several: bool) -> Markup:
    head = element("h3", run.name) if several else ""
    about, rows = _about(run), run.confusions["worst"]
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


def _about(run: RunFolder) -> str:
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
    return element(
        "div",
        element(heading, row["name"]),
        element("p", f"{accuracy:.1f} %: {row['right']} of {row['images']} right, {most}"),
        element("div", *figures, class_="wrong" if images is not None else "wrong places"),
        class_="class",
    )


def _picture(wrong: dict[str, Any], images: Catalog | None) -> Markup:
    """Return a small picture; where it lay, if it has gone, or is another one than was evaluated."""
    index, place = wrong["index"], element("span", wrong["location"], class_="place")
    try:
        if images is None or index >= len(images) or images.name(index) != wrong["name"]:
            return place
        small = thumbnail(images, index, (_SIDE, _SIDE))
    except BadSampleError:
        return place
    # The class that it was taken for is beside it.
    return element(
        "img",
        src=inlined_jpeg(small),
        alt=wrong["name"],
        title=wrong["location"],
        width=small.width,
        height=small.height,
    )
