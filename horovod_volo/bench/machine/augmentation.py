"""RandAugment on the whole image against RandAugment on the crop: images per second, and how much is filled.

Rates are by the wall clock; CPU seconds are compared, which decide how many cores a GPU needs. How much of a
crop is filled depends on the drawn operations alone: the geometric ones are applied to white images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, Flag, GeneratedImages, ImgSize, OptionalDataDir, Pairs, Threads
from horovod_volo.bench.comparison import alternate, default_device
from horovod_volo.bench.machine.image_streams import (
    EPOCH,
    SEED,
    single_rank_stream,
    threads_or_all,
    time_epoch,
    training_catalog,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.rand_augment import draw_operations
from horovod_volo.data.augmentation.whole_image import augment_part, parts_needed
from horovod_volo.data.loader import TrainLoader

_SHAPE = (75, 100)  # height and width: the filled fraction is the same in larger images
_SIDE = 64
_WHITE = 255


class Fractions(NamedTuple):
    """Means over plans."""

    decoded: float  # of an image
    filled: float  # of a crop


def measure(
    *,
    data_dir: OptionalDataDir = "",
    images: GeneratedImages = 1024,
    plans: Annotated[int, Flag("augmentation plans drawn to measure the filled fraction")] = 5000,
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    threads: Threads = 0,
    pairs: Pairs = 7,
) -> Result:
    """Measure epochs of the training images."""
    threads = threads_or_all(threads)
    on_crop = Data(batch_size=batch_size)
    cases = {"whole image": replace(on_crop, randaugment_on="image"), "crop": on_crop}
    wall: dict[str, list[float]] = {name: [] for name in cases}
    with training_catalog(data_dir, images, batch_size) as catalog:
        streams = {
            name: single_rank_stream(catalog, settings, image_size=img_size, threads=threads)
            for name, settings in cases.items()
        }
        whole, crop = (_block(streams[name], wall[name]) for name in cases)
        try:
            whole(), crop()  # the first epoch starts threads
            found = alternate(whole, crop, pairs)
        finally:
            for stream in streams.values():
                stream.close()
    figures = [Figure.of_rate(f"RandAugment on the {name}", wall[name][1:]) for name in cases]
    label = "images a second of CPU beside those on the crop"
    figures.append(Figure.of_estimate(label, found.times_faster, "x"))
    for name, settings in cases.items():
        fractions = mean_fractions(settings, plans)
        figures.append(Figure(f"on the {name}: of an image decoded", 100 * fractions.decoded, "%"))
        figures.append(Figure(f"on the {name}: of a crop filled", 100 * fractions.filled, "%"))
    where = f"on the {default_device().type}, data threads: {threads}"
    return Result("augmentation", f"augmented training images at {img_size} px {where}", figures)


def _block(stream: TrainLoader, wall: list[float]) -> Callable[[], float]:
    """Return a function that reads an epoch, records its wall-clock time and returns its CPU time."""

    def block() -> float:
        seconds = time_epoch(stream)
        wall.append(seconds.wall)
        return seconds.cpu

    return block


def mean_fractions(settings: Data, plans: int) -> Fractions:
    """Return the mean fractions over so many drawn plans."""
    indices, sizes = np.arange(plans), np.tile(np.array(_SHAPE), (plans, 1))
    crops = draw_crops(SEED, EPOCH, indices, sizes, settings).boxes
    drawn = draw_operations(SEED, EPOCH, indices, settings)
    on_image = settings.randaugment_on == "image"
    needed = parts_needed(crops, sizes, drawn).decoded if on_image else crops
    moving = replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))
    parts = parts_needed(crops, sizes, moving)
    filled = 0.0
    for place in np.flatnonzero(moving.moving).tolist():
        if on_image:
            height, width = parts.decoded[place, 2:].tolist()
            crop = augment_part(_white(height, width), moving.of(place), parts.of(place))
        else:
            crop = _white(_SIDE, _SIDE)
            augment_(crop, moving.of(place))
        # A pixel interpolated between image and fill colour counts by its fraction of the fill colour.
        filled += float((_WHITE - crop[0, 0].float()).mean()) / (_WHITE - FILL[0])
    decoded = needed[:, 2:].prod(axis=1) / sizes.prod(axis=1)
    return Fractions(decoded=float(decoded.mean()), filled=filled / plans)


def _white(height: int, width: int) -> Tensor:
    return torch.full((1, 3, height, width), _WHITE, dtype=torch.uint8)
