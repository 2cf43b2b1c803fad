"""Start-up time and memory of the image catalog for as many images as ImageNet has, against timm's.

A folder of links to a few empty files stands for the images. Each measurement is a process of its own that
has finished its imports; it then opens the catalog, draws the order of an epoch and reads every target. The
peer is the start of timm's loader, which lists the folders on every rank.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Annotated

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import alternate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.arguments import whole_number
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.sampler import epoch_order
from horovod_volo.models.timm_api import listed_images

Start = Callable[[str, str], object]  # from the data folder and the cache folder to what a rank then holds

_CLASSES = 1000


def measure(
    *,
    images: Annotated[int, Flag("images to emulate, as links", read=whole_number(_CLASSES))] = 1281167,
    pairs: Pairs = 7,
) -> Result:
    """Measure so many images in a temporary folder."""
    gained: dict[Start, list[float]] = {_start: [], _timm_start: []}
    with tempfile.TemporaryDirectory() as folder:
        data_dir, cache = f"{folder}/data", f"{folder}/lists"
        _link_images(Path(data_dir) / "train", images)
        cold, _ = _in_new_process(_start, data_dir, cache)

        def block(start: Start) -> float:
            seconds, memory = _in_new_process(start, data_dir, cache)
            gained[start].append(memory / images)
            return seconds

        found = alternate(partial(block, _start), partial(block, _timm_start), pairs)
    return Result(
        "catalog",
        f"start-up of a rank on {images:,} images of {_CLASSES:,} classes",
        [
            Figure("the first time, by one rank", cold, "s"),
            Figure.of_seconds("from the list that is kept", found.ours, "s"),
            Figure.of_seconds("timm's listing", found.peer, "s"),
            Figure.of("faster than timm's", found.ratios, "x"),
            Figure.of("resident memory of an image", gained[_start], "bytes"),
            Figure.of("timm's", gained[_timm_start], "bytes"),
        ],
    )


def _link_images(folder: Path, images: int) -> None:
    """Fill class folders with links; each class has its own file, as the links of one file are limited."""
    for number in range(_CLASSES):
        class_folder = folder / f"n{number:08d}"
        class_folder.mkdir(parents=True)
        first = class_folder / f"{class_folder.name}_0.JPEG"
        first.touch()
        for image in range(1, images // _CLASSES + (number < images % _CLASSES)):
            os.link(first, class_folder / f"{class_folder.name}_{image}.JPEG")


def _in_new_process(start: Start, data_dir: str, cache: str) -> tuple[float, float]:
    """Return the seconds of a start and the resident bytes that it adds."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_measure_start, start, data_dir, cache).result()


def _measure_start(start: Start, data_dir: str, cache: str) -> tuple[float, float]:
    gc.collect()
    before, began = resident_bytes(), perf_counter()
    held = start(data_dir, cache)
    seconds = perf_counter() - began
    gc.collect()
    gained = resident_bytes() - before
    del held
    return seconds, gained


def _start(data_dir: str, cache: str) -> object:
    catalog = build_catalog(data_dir, "train", Path(cache))
    order = epoch_order(0, 0, len(catalog))
    return catalog, order, int(catalog.targets.max())


def _timm_start(data_dir: str, _: str) -> object:
    return listed_images(f"{data_dir}/train")


def resident_bytes() -> int:
    """Return how much of this process's memory is resident, shared and mapped pages included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
