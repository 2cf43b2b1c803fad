"""What the plan of one sample makes of its image, carried out by Pillow and timm alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from published_augment import timm_augment

from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.rand_augment import Operations


def by_pillow(
    path: str, index: int, settings: Data, drawn: Operations, *, seed: int, epoch: int, side: int
) -> NDArray[np.uint8]:
    """Return the image (side, side, 3) before anything is erased; `drawn` are this sample's operations."""
    alone = np.array([index])
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    plan = draw_crops(seed, epoch, alone, np.array([[image.height, image.width]]), settings)
    if plan.flip_horizontal[0]:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if plan.flip_vertical[0]:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if settings.randaugment_on == "image":
        image = operated(image, drawn)
    top, left, height, width = plan.boxes[0].tolist()
    chosen = Image.Resampling.BICUBIC if plan.bicubic[0] else Image.Resampling.BILINEAR
    cut = image.crop((left, top, left + width, top + height)).resize((side, side), chosen)
    return np.asarray(operated(cut, drawn) if settings.randaugment_on == "crop" else cut)


def operated(image: Image.Image, drawn: Operations) -> Image.Image:
    """Return what timm's functions make of an image."""
    colours = np.asarray(image)
    for kind, amount, bicubic in zip(drawn.kinds[0], drawn.arguments[0], drawn.bicubic[0], strict=True):
        if kind != ops.NONE:
            colours = timm_augment(kind, colours, float(amount), bicubic=bool(bicubic))
    return Image.fromarray(colours)
