"""The augmentation of one training image, computed by Pillow and timm alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from published_augment import timm_augment

from horovod_volo.config.data_settings import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.policy import Operations


def augmented_by_pillow(
    path: str, index: int, settings: Data, drawn: Operations, *, seed: int, epoch: int, side: int
) -> NDArray[np.uint8]:
    """Return the image (side, side, 3) before random erasing; `drawn` are the operations of this sample."""
    alone = np.array([index])
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    crop_flip = draw_crops(seed, epoch, alone, np.array([[image.height, image.width]]), settings)
    if crop_flip.flip_horizontal[0]:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if crop_flip.flip_vertical[0]:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if settings.randaugment_on == "image":
        image = apply_operations(image, drawn)
    top, left, height, width = crop_flip.boxes[0].tolist()
    chosen = Image.Resampling.BICUBIC if crop_flip.bicubic[0] else Image.Resampling.BILINEAR
    cut = image.crop((left, top, left + width, top + height)).resize((side, side), chosen)
    return np.asarray(apply_operations(cut, drawn) if settings.randaugment_on == "crop" else cut)


def apply_operations(image: Image.Image, drawn: Operations) -> Image.Image:
    """Apply timm's functions for these operations to an image."""
    colours = np.asarray(image)
    for kind, amount, bicubic in zip(drawn.kinds[0], drawn.arguments[0], drawn.bicubic[0], strict=True):
        if kind != ops.NONE:
            colours = timm_augment(kind, colours, float(amount), bicubic=bool(bicubic))
    return Image.fromarray(colours)
