"""RandAugment on the whole image beside RandAugment on the crop: images a second, and what crops show.

Images a second are by the clock; compared are seconds of CPU, which decide how many cores a GPU needs.
How much of a crop is filled depends on the plans alone: they are drawn for small images of a photograph's
shape, and white pictures are moved by them, recoloured by none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from torch import Tensor

from horovod_volo.bench.pairs import alternate, wait_for
from horovod_volo.bench.photographs import write_photographs
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.stream_alone import SEED, device_here, stream_alone
from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.rand_augment import draw_operations
from horovod_volo.data.augmentation.whole_image import augment_part, parts_needed
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainLoader

_EPOCH = 0
_SHAPE = (75, 100)  # height and width: the share that is filled is the same in larger images
_SIDE = 64
_WHITE = 255


@dataclass(frozen=True)
class Shares:
    """Of an image, on average over plans: what is decoded; of a crop: what is filled."""

    decoded: float
    filled: float


def measure(
    *, data_dir: str, images: int, plans: int, img_size: int, batch_size: int, threads: int, pairs: int
) -> Result:
    """Measure epochs of the training images below `data_dir`, or else of so many made for this."""
    if data_dir:
        return _measure(data_dir, plans, img_size, batch_size, threads, pairs)
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images)
        return _measure(folder, plans, img_size, batch_size, threads, pairs)


def _measure(data_dir: str, plans: int, img_size: int, batch_size: int, threads: int, pairs: int) -> Result:
    catalog = build_catalog(data_dir, "train", folder=None)
    if len(catalog) < batch_size:
        raise UserError(
            f"{data_dir} has {len(catalog)} training images. Use --batch-size {len(catalog)} or less."
        )
    on_crop = Data(batch_size=batch_size)
    on_image = replace(on_crop, randaugment_on="image")
    threads = threads or len(os.sched_getaffinity(0))
    streams = [
        stream_alone(catalog, settings, image_size=img_size, threads=threads)
        for settings in (on_image, on_crop)
    ]
    image_rates: list[float] = []
    crop_rates: list[float] = []
    image_epoch, crop_epoch = _epoch(streams[0], image_rates), _epoch(streams[1], crop_rates)
    try:
        image_epoch(), crop_epoch()  # the first of each starts threads
        result = alternate(image_epoch, crop_epoch, pairs)
    finally:
        for stream in streams:
            stream.close()
    figures = [
        Figure.of("RandAugment on the whole image", image_rates[1:], "images/s"),
        Figure.of("RandAugment on the crop", crop_rates[1:], "images/s"),
        Figure.of_estimate("images a second of CPU beside those on the crop", result.times_faster, "x"),
    ]
    for name, settings in (("whole image", on_image), ("crop", on_crop)):
        shares = shares_of(settings, plans)
        figures.append(Figure(f"on the {name}: of an image decoded", 100 * shares.decoded, "%"))
        figures.append(Figure(f"on the {name}: of a crop filled", 100 * shares.filled, "%"))
    title = f"augmented training images at {img_size} px on the {device_here().type}, data threads: {threads}"
    return Result("augmentation", title, figures)


def _epoch(stream: TrainLoader, rates: list[float]) -> Callable[[], float]:
    def cpu_seconds_of_an_image() -> float:
        began, cpu_before = perf_counter(), process_time()
        images = sum(len(batch.images) for batch in stream.batches(_EPOCH, 0))
        wait_for(device_here())
        rates.append(images / (perf_counter() - began))
        return (process_time() - cpu_before) / images

    return cpu_seconds_of_an_image


def shares_of(settings: Data, plans: int) -> Shares:
    """Return what is decoded and filled on average over so many plans."""
    indices, sizes = np.arange(plans), np.tile(np.array(_SHAPE), (plans, 1))
    crops = draw_crops(SEED, _EPOCH, indices, sizes, settings).boxes
    drawn = draw_operations(SEED, _EPOCH, indices, settings)
    needed = parts_needed(crops, sizes, drawn).decoded if settings.randaugment_on == "image" else crops
    moving = replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))
    parts = parts_needed(crops, sizes, moving)
    filled = 0.0
    for place in np.flatnonzero(moving.moving).tolist():
        if settings.randaugment_on == "image":
            height, width = parts.decoded[place, 2:].tolist()
            crop = augment_part(_white(height, width), moving.of(place), parts.of(place))
        else:
            crop = _white(_SIDE, _SIDE)
            augment_(crop, moving.of(place))
        # A pixel between the image and what is filled counts as much as it has of the fill colour.
        filled += float((_WHITE - crop[0, 0].float()).mean()) / (_WHITE - FILL[0])
    decoded = needed[:, 2:].prod(axis=1) / sizes.prod(axis=1)
    return Shares(decoded=float(decoded.mean()), filled=filled / plans)


def _white(height: int, width: int) -> Tensor:
    return torch.full((1, 3, height, width), _WHITE, dtype=torch.uint8)
