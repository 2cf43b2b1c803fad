"""Progressive image size: training images are small at first, and grow in equal steps to --img-size.

Invariant: the side is a function of the step and the settings alone, so a resumed run goes on at its side.
"""

import torch.nn.functional as F
from torch import Tensor

from horovod_volo.config.schema import Model
from horovod_volo.core.errors import UserError


def check_first_size(settings: Model, stride: int) -> None:
    """Raise UserError unless the first side is one that the model, of this stride, can grow from."""
    first, full = settings.first_size, settings.img_size
    if first and not stride:
        raise UserError(
            f"--first-size is for networks with tokens, and {settings.model} has none. Drop it, or use "
            "--model volo_d1, another VOLO or an LV-ViT."
        )
    if first and (first % stride or not stride <= first < full):
        raise UserError(
            f"--first-size takes multiples of {stride} below --img-size, which is {full}, not {first}. "
            f"Use --first-size {max(stride, full // 2 // stride * stride)}, or 0."
        )


def has_full_side(settings: Model, step: int, steps: int) -> bool:
    """Return whether images of this step, of a run of so many, have --img-size."""
    return not settings.first_size or step >= settings.full_size_after * steps


def training_side(settings: Model, stride: int, step: int, steps: int) -> int:
    """Return the side of the training images at a step of a run of so many steps."""
    first, full = settings.first_size, settings.img_size
    if has_full_side(settings, step, steps):
        return full
    grown = step / (settings.full_size_after * steps)
    return first + int(grown * (full - first) / stride) * stride


def resized(images: Tensor, side: int) -> Tensor:
    """Return square images with this side, averaged over what becomes a pixel."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
