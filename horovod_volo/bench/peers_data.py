"""The same training images by Pillow, one thread, image by image: the peer of the DALI stream."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_STD


def pillow_batch(
    catalog: Catalog, indices: NDArray[np.int64], settings: Data, *, image_size: int, seed: int, epoch: int
) -> NDArray[np.float32]:
    """Read, cut, resize, flip and normalise images, (batch, 3, side, side)."""
    images = [Image.open(io.BytesIO(catalog.read(index).data)) for index in indices]
    sizes = np.array([(image.height, image.width) for image in images])
    plan = draw_crops(seed, epoch, indices, sizes, settings)
    pixels = []
    for image, box, horizontal, vertical in zip(
        images, plan.stored_boxes(sizes).tolist(), plan.flip_horizontal, plan.flip_vertical, strict=True
    ):
        top, left, height, width = box
        cut = image.convert("RGB").crop((left, top, left + width, top + height))
        cut = cut.resize((image_size, image_size), Image.Resampling.BICUBIC)
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if horizontal else cut
        pixels.append(np.asarray(cut.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if vertical else cut))
    colours = np.stack(pixels).astype(np.float32) / 255  # (batch, side, side, 3)
    normalised = (colours - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
