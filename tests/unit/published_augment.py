"""timm's own augmentation, single operations and recorded random draws, and its pixels of an evaluation."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.policy import Operations
from horovod_volo.models import timm_api  # noqa: F401  # before timm, which imports torchvision

SPELLING = "rand-m9-mstd0.5-inc1"
NAMES = {
    ops.AUTO_CONTRAST: "AutoContrast",
    ops.EQUALIZE: "Equalize",
    ops.INVERT: "Invert",
    ops.ROTATE: "Rotate",
    ops.POSTERIZE: "PosterizeIncreasing",
    ops.SOLARIZE: "SolarizeIncreasing",
    ops.SOLARIZE_ADD: "SolarizeAdd",
    ops.COLOR: "ColorIncreasing",
    ops.CONTRAST: "ContrastIncreasing",
    ops.BRIGHTNESS: "BrightnessIncreasing",
    ops.SHARPNESS: "SharpnessIncreasing",
    ops.SHEAR_X: "ShearX",
    ops.SHEAR_Y: "ShearY",
    ops.TRANSLATE_X: "TranslateXRel",
    ops.TRANSLATE_Y: "TranslateYRel",
}
FILL = (124, 116, 104)


def timm_augment(
    kind: ops.Operation, image: NDArray[np.uint8], amount: float, *, bicubic: bool, nearest: bool = False
) -> NDArray[np.uint8]:
    """Apply timm's function for an operation to an image (height, width, 3)."""
    from timm.data.auto_augment import NAME_TO_OP

    number: Any = int(amount) if kind in (ops.POSTERIZE, ops.SOLARIZE_ADD) else amount
    arguments = () if kind in (ops.AUTO_CONTRAST, ops.EQUALIZE, ops.INVERT) else (number,)
    filters = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    filters = Image.Resampling.NEAREST if nearest else filters
    changed = NAME_TO_OP[NAMES[kind]](Image.fromarray(image), *arguments, fillcolor=FILL, resample=filters)
    return np.asarray(changed)


def operations_of(
    steps: Sequence[tuple[ops.Operation, float]], batch: int, *, bicubic: bool = False
) -> Operations:
    """Return the same operations, with these arguments, for each image of a batch."""
    kinds = np.tile(np.array([kind for kind, _ in steps], dtype=np.int64), (batch, 1))
    arguments = np.tile(np.array([amount for _, amount in steps], dtype=np.float32), (batch, 1))
    return Operations(kinds, arguments, np.full(kinds.shape, bicubic))


def record_draws(images: int) -> dict[str, list[float]]:
    """Return the arguments of each operation that timm's RandAugment draws for this number of images."""
    from timm.data.auto_augment import rand_augment_transform

    calls: dict[str, list[float]] = defaultdict(list)
    transform = rand_augment_transform(SPELLING, {"img_mean": FILL})
    for operation in transform.ops:

        def record(image: Any, *arguments: float, _name: str = operation.name, **_: Any) -> Any:
            calls[_name].append(float(arguments[0]) if arguments else 0.0)
            return image

        operation.aug_fn = record
    for _ in range(images):
        transform(None)
    return calls


def timm_erasing(images: int, side: int) -> NDArray[np.int64]:
    """Return top, left, height and width of the boxes that timm's RandomErasing erases, (boxes, 4)."""
    from timm.data.random_erasing import RandomErasing

    erase = RandomErasing(probability=0.25, mode="const", device="cpu")
    boxes = []
    for _ in range(images):
        mask = erase(torch.ones(1, side, side))[0] == 0
        rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
        if len(rows):
            boxes.append([int(rows[0]), int(columns[0]), len(rows), len(columns)])
    return np.array(boxes)


def timm_pixels(
    file: str,
    image_size: int,
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
    crop_mode: str = "center",
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the pixels (3, height, width) of an evaluation, and the mask of their black border."""
    from timm.data import create_transform

    how: dict[str, Any] = {"interpolation": interpolation, "crop_pct": crop_pct, "crop_mode": crop_mode}
    transform = create_transform(image_size, is_training=False, normalize=False, **how)
    with Image.open(file) as image:
        white = Image.new("RGB", image.size, "white")
        return transform(image.convert("RGB")).numpy().astype(float), transform(white)[0].numpy() == 0
