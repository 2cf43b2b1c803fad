"""The worst classes of a run, with small pictures of images that were wrong, where the data can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.evaluation.contact_sheet import inlined_jpeg
from horovod_volo.report.markup import Markup, element, folded, joined
from horovod_volo.report.quantities import AVERAGED
from horovod_volo.report.run_files import RunFiles
from horovod_volo.tasks.confusions import CONFUSIONS, thumbnail

_SIDE = 112  # pixels
_OPEN, _OPEN_OF_SEVERAL = 8, 3  # classes that are shown without a click

_INTRODUCTION = (
    "The classes with the lowest accuracy, and images of them that were wrong with the highest probability. "
    "Under each image is what it was taken for."
)

Row = dict[str, Any]


def worst_classes(runs: Sequence[RunFiles], data_dir: str) -> Markup:
    """Return the worst classes of each run; nothing, if no run has recorded them."""
    most = _OPEN if len(runs) == 1 else _OPEN_OF_SEVERAL
    parts = [_of_run(run, data_dir, most, named=len(runs) > 1) for run in runs if run.confusions]
    return joined([element("p", _INTRODUCTION), *parts]) if parts else Markup()


def _of_run(run: RunFiles, data_dir: str, most: int, *, named: bool) -> Markup:
    try:
        rows = [_checked(row) for row in run.confusions["worst"]]
        about = _about(run)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{run.folder / CONFUSIONS} is damaged. Remove it: the next evaluation writes it again."
        ) from None
    head = [element("h3", run.name)] if named else []
    if not rows:
        return joined([*head, element("p", f"{about} Every image was right.")])
    images, problem = _open_images(run, data_dir)
    heading = "h4" if named else "h3"
    cards = [_card(row, images, heading) for row in rows]
    shown = [element("div", *cards[:most], class_="classes")]
    if cards[most:]:
        shown.append(
            folded(f"{len(cards) - most} more classes", element("div", *cards[most:], class_="classes"))
        )
    if images is not None:
        images.close()
    note = [element("p", problem, class_="note")] if problem else []
    return joined([*head, element("p", about), *note, *shown])


def _checked(row: Row) -> Row:
    """Return a class's row; raise an error if a part of it is missing."""
    wrong = [
        {
            "index": int(each["index"]),
            "name": str(each["name"]),
            "location": str(each["location"]),
            "taken_for": str(each["taken_for"]),
            "probability": float(each["probability"]),
        }
        for each in row["wrong"]
    ]
    counts = {name: int(row[name]) for name in ("images", "right", "mistaken")}
    return {"name": str(row["name"]), "mistaken_for": str(row["mistaken_for"]), "wrong": wrong, **counts}


def _about(run: RunFiles) -> str:
    found = run.confusions
    step, top1 = int(found["step"]), float(found["top1"])
    record = next((each for each in run.evaluations if each["step"] == step), {})
    is_averaged = record.get("top1") != top1 and record.get(f"{AVERAGED}top1") == top1
    weights = ", with averaged weights" if is_averaged else ""
    return (
        f"At step {step:,}{weights}: {top1:.2f} % of {int(found['images']):,} held-out images of "
        f"{int(found['classes']):,} classes were right."
    )


def _open_images(run: RunFiles, data_dir: str) -> tuple[Catalog | None, str]:
    """Return the held-out images of a run, or None and why they are not shown."""
    given = data_dir or str(run.setting("data", "data_dir") or "")
    held_out = HeldOut(
        str(run.setting("data", "val_split") or ""),
        float(run.setting("data", "val_share") or 0.0),
        int(run.setting("run", "seed") or 0),
    )
    remedy = "Where they lay is said instead. --data-dir names the folder where the data is now."
    try:
        catalog = build_catalog(given, "val", None, held_out)
    except UserError:
        return None, f"The images are not shown: there are none in {given or 'an unknown folder'}. {remedy}"
    digest = run.confusions.get("image_list")
    if catalog.digest == digest or data_dir:
        return catalog, ""
    catalog.close()
    return None, f"The images are not shown: those in {given} are others than the run evaluated. {remedy}"


def _card(row: Row, images: Catalog | None, heading: str) -> Markup:
    accuracy = 100 * row["right"] / max(1, row["images"])
    most = f"{row['mistaken']} taken for {row['mistaken_for']}" if row["mistaken"] else "none right"
    figures = [_wrong_image(each, images) for each in row["wrong"]]
    return element(
        "div",
        element(heading, row["name"]),
        element("p", f"{accuracy:.1f} %: {row['right']} of {row['images']} right, {most}"),
        element("div", *figures, class_="wrong" if images is not None else "wrong places"),
        class_="class",
    )


def _wrong_image(wrong: Row, images: Catalog | None) -> Markup:
    said = element("figcaption", wrong["taken_for"], element("small", f"{100 * wrong['probability']:.0f} %"))
    place = element("span", wrong["location"], class_="place")
    picture = place if images is None else (_picture(wrong, images) or place)
    return element("figure", picture, said)


def _picture(wrong: Row, images: Catalog) -> Markup | None:
    """Return a small picture; None if the image has gone, or is another one than was evaluated."""
    index = wrong["index"]
    try:
        if index >= len(images) or images.name(index) != wrong["name"]:
            return None
        small = thumbnail(images, index, (_SIDE, _SIDE))
    except BadSampleError:
        return None
    # What it was taken for is beside it.
    return element(
        "img",
        src=inlined_jpeg(small),
        alt=wrong["name"],
        title=wrong["location"],
        width=str(small.width),
        height=str(small.height),
    )
