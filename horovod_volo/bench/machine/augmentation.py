"""RandAugment on the whole image against RandAugment on the crop: images per second, and how much is filled.

Rates are by the wall clock; CPU seconds are compared, which decide how many cores a GPU needs. How much of a
crop is filled depends on the drawn operations alone: the geometric ones are applied to white images.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, GeneratedImages, ImgSize, Pairs
from horovod_volo.bench.comparison import alternate, default_device
from horovod_volo.bench.machine.data import EPOCH, SEED, TimedEpochs, generated_catalog
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.data_settings import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.whole_image import augment_part, parts_needed

_SHAPE = (75, 100)  # height and width: the filled fraction is the same in larger images
_SIDE = 64
_WHITE = 255
_DRAWN_IMAGES = 5000  # of which the filled fraction is the mean


def measure(
    *,
    images: GeneratedImages = 1024,
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    pairs: Pairs = 7,
) -> Result:
    """Measure epochs of the training images."""
    on_crop = Data(batch_size=batch_size)
    on_image = replace(on_crop, randaugment_on="image")
    with (
        generated_catalog(images, batch_size) as catalog,
        closing(TimedEpochs(catalog, on_image, img_size)) as whole_image,
        closing(TimedEpochs(catalog, on_crop, img_size)) as crop,
    ):
        whole_image.read(), crop.read()  # the first epoch starts threads
        found = alternate(whole_image.read, crop.read, pairs)
    figures = [
        Figure.of_rate("RandAugment on the whole image", whole_image.wall[1:]),
        Figure.of_rate("RandAugment on the crop", crop.wall[1:]),
        Figure.of("images a second of CPU beside those on the crop", found.ratios, "x"),
    ]
    for name, settings in (("whole image", on_image), ("crop", on_crop)):
        decoded, filled = mean_fractions(settings)
        figures.append(Figure(f"on the {name}: of an image decoded", 100 * decoded, "%"))
        figures.append(Figure(f"on the {name}: of a crop filled", 100 * filled, "%"))
    where = f"on the {default_device().type}, data threads: {len(os.sched_getaffinity(0))}"
    return Result("augmentation", f"augmented training images at {img_size} px {where}", figures)


def mean_fractions(settings: Data) -> tuple[float, float]:
    """Return means over images: the fraction of an image that is decoded, and of a crop that is filled."""
    indices, sizes = np.arange(_DRAWN_IMAGES), np.tile(np.array(_SHAPE), (_DRAWN_IMAGES, 1))
    crops = draw_crops(SEED, EPOCH, indices, sizes, settings).boxes
    drawn = draw_operations(SEED, EPOCH, indices, settings)
    on_image = settings.randaugment_on == "image"
    needed = parts_needed(crops, sizes, drawn).decoded if on_image else crops
    moving = replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))
    parts = parts_needed(crops, sizes, moving)
    filled = 0.0
    for place in np.flatnonzero(moving.geometric).tolist():
        if on_image:
            height, width = parts.decoded[place, 2:].tolist()
            crop = augment_part(_white(height, width), moving.of(place), parts.of(place))
        else:
            crop = _white(_SIDE, _SIDE)
            augment_(crop, moving.of(place))
        # A pixel interpolated between image and fill colour counts by its fraction of the fill colour.
        filled += float((_WHITE - crop[0, 0].float()).mean()) / (_WHITE - FILL[0])
    decoded = needed[:, 2:].prod(axis=1) / sizes.prod(axis=1)
    return float(decoded.mean()), filled / _DRAWN_IMAGES


def _white(height: int, width: int) -> Tensor:
    return torch.full((1, 3, height, width), _WHITE, dtype=torch.uint8)
