"""How long a rank takes to know its images, and how much memory that holds, for as many as ImageNet has.

A folder of links to a few empty files stands for the images. Each measurement is a process of its own that
has imported everything and then finds the list, draws the order of an epoch and looks at every target; the
peer is what timm's loader does first: it lists the folders itself, on every rank.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from horovod_volo.bench.memory import resident_bytes
from horovod_volo.bench.pairs import alternate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.sampler import epoch_order
from horovod_volo.models.timm_api import listed_images

Measurement = tuple[float, float]  # seconds, and bytes of resident memory gained
Start = Callable[[str, str], object]  # from the data folder and the folder of lists to what a rank then holds


def measure(*, images: int, classes: int, pairs: int) -> Result:
    """Measure so many images, listed below a temporary folder."""
    if images < classes:
        raise UserError(f"--images takes {classes} or more, one for each class.")
    gained: dict[Start, list[float]] = {_start: [], _timm_start: []}
    with tempfile.TemporaryDirectory() as folder:
        data_dir, lists = f"{folder}/data", f"{folder}/lists"
        _link(Path(data_dir) / "train", images, classes)
        cold, _ = _apart(_start, data_dir, lists)

        def seconds_of(start: Start) -> float:
            seconds, memory = _apart(start, data_dir, lists)
            gained[start].append(memory / images)
            return seconds

        result = alternate(lambda: seconds_of(_start), lambda: seconds_of(_timm_start), pairs)
    return Result(
        "catalog",
        f"start-up of a rank on {images:,} images of {classes:,} classes",
        [
            Figure("the first time, by one rank", cold, "s"),
            Figure.of("from the list that is kept", result.ours, "s"),
            Figure.of("timm's listing", result.peer, "s"),
            Figure.of_estimate("faster than timm's", result.times_faster, "x"),
            Figure.of("resident memory of an image", gained[_start], "bytes"),
            Figure.of("timm's", gained[_timm_start], "bytes"),
        ],
    )


def _link(folder: Path, images: int, classes: int) -> None:
    """Fill class folders with links, all of a class to one file: a file may not have too many."""
    for number in range(classes):
        class_folder = folder / f"n{number:08d}"
        class_folder.mkdir(parents=True)
        first = class_folder / f"{class_folder.name}_0.JPEG"
        first.touch()
        for image in range(1, images // classes + (number < images % classes)):
            os.link(first, class_folder / f"{class_folder.name}_{image}.JPEG")


def _apart(start: Start, data_dir: str, lists: str) -> Measurement:
    """Measure in a process of its own, whose memory nothing else has grown."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_measured, start, data_dir, lists).result()


def _measured(start: Start, data_dir: str, lists: str) -> Measurement:
    gc.collect()
    before, began = resident_bytes(), perf_counter()
    held = start(data_dir, lists)
    seconds = perf_counter() - began
    gc.collect()
    gained = resident_bytes() - before
    del held
    return seconds, gained


def _start(data_dir: str, lists: str) -> object:
    catalog = build_catalog(data_dir, "train", Path(lists))
    order = epoch_order(0, 0, len(catalog))
    return catalog, order, int(catalog.targets.max())


def _timm_start(data_dir: str, _: str) -> object:
    return listed_images(f"{data_dir}/train")
