"""RandAugment before the crop: pixels are Pillow's of the whole image, and no more is decoded than they need.

Everything goes through the training stream and DALI; the images are those of the plan, whose crops show
one part or another of what was moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_images import only_batch, place_coded, smooth, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image
from pillow_plan import by_pillow

from horovod_volo.config.schema import Data
from horovod_volo.data import loader as stream_module
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.rand_augment import Operations, draw_operations
from horovod_volo.data.augmentation.whole_image import Parts, augment_part, parts_needed
from horovod_volo.data.images.catalog import Catalog, build_catalog

SEED, EPOCH, SIDE, IMAGES = 5, 1, 64, 12
SETTINGS = Data(batch_size=IMAGES, hflip=0.5, vflip=0.5, reprob=0.0, randaugment_on="image")
SIZES = [(160, 100), (97, 151), (64, 64), (210, 145)]  # width, height
AMOUNTS = {
    ops.ROTATE: 25.0,
    ops.SHEAR_X: -0.29,
    ops.SHEAR_Y: 0.29,
    ops.TRANSLATE_X: 0.38,
    ops.TRANSLATE_Y: -0.41,
}
ROTATE, SHIFT = (ops.ROTATE, -22.0), (ops.TRANSLATE_X, 0.3)
SEQUENCES = [
    (ROTATE, SHIFT),
    (SHIFT, (ops.INVERT, 0.0), (ops.SHEAR_Y, -0.25)),
    (ROTATE, (ops.AUTO_CONTRAST, 0.0)),
    ((ops.CONTRAST, 0.3), ROTATE),
    (SHIFT, (ops.EQUALIZE, 0.0), ROTATE),
    ((ops.SHARPNESS, 1.8), (ops.SHARPNESS, 0.3), SHIFT),
]


def operations_of(
    steps: tuple[tuple[ops.Operation, float], ...], batch: int, *, bicubic: bool = True
) -> Operations:
    kinds = np.tile(np.array([kind for kind, _ in steps], dtype=np.int64), (batch, 1))
    arguments = np.tile(np.array([amount for _, amount in steps], dtype=np.float32), (batch, 1))
    return Operations(kinds, arguments, np.full(kinds.shape, bicubic))


def batch_of(catalog: Catalog) -> Any:
    return only_batch(catalog, None, SETTINGS, side=SIDE, seed=SEED, epoch=EPOCH)


def assert_as_pillow(
    folder: Path, pictures: list[Image.Image], drawn: Operations, *, mean: float = 0.5, most: int = 10
) -> None:
    """Compare a batch with Pillow's; `drawn` was put in the place of what is drawn."""
    images = {f"train/a/{number:02d}.png": picture for number, picture in enumerate(pictures)}
    catalog = build_catalog(str(write_images(folder, images)), "train", None)
    batch = batch_of(catalog)
    for shown, index in zip(unnormalised(batch.images), batch.indices.tolist(), strict=True):
        path = catalog.location(index)
        theirs = by_pillow(path, index, SETTINGS, drawn.of(0), seed=SEED, epoch=EPOCH, side=SIDE)
        difference = np.abs(shown.transpose(1, 2, 0) - theirs)
        assert difference.mean() < mean
        # Beside the fill, the resize's bicubic filter overshoots; torch and Pillow cut that off in another
        # one of its two passes.
        assert difference.max() < most


@pytest.mark.parametrize("bicubic", [True, False])
@pytest.mark.parametrize("kind", ops.GEOMETRIC)
def test_a_crop_shows_of_the_moved_image_what_pillow_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ops.Operation, bicubic: bool
) -> None:
    drawn = operations_of(((kind, AMOUNTS[kind]),), IMAGES, bicubic=bicubic)
    monkeypatch.setattr(stream_module, "draw_operations", lambda *_: drawn)
    sizes = [SIZES[number % len(SIZES)] for number in range(IMAGES)]
    half = IMAGES // 2
    pictures = [place_coded(*size) for size in sizes[:half]]
    pictures += [smooth(*size, seed=number) for number, size in enumerate(sizes[half:])]
    assert_as_pillow(tmp_path, pictures, drawn)


@pytest.mark.parametrize("steps", SEQUENCES)
def test_operations_follow_each_other_on_the_whole_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[tuple[ops.Operation, float], ...]
) -> None:
    """Those that count colours count all of the image's, moved and filled as it is by then."""
    drawn = operations_of(steps, IMAGES)
    monkeypatch.setattr(stream_module, "draw_operations", lambda *_: drawn)
    pictures = [smooth(*SIZES[number % len(SIZES)], seed=number) for number in range(IMAGES)]
    # Equalizing pulls colours that few pixels have far apart, and with them a rounding's difference.
    equalized = any(kind == ops.EQUALIZE for kind, _ in steps)
    assert_as_pillow(tmp_path, pictures, drawn, mean=1.0 if equalized else 0.5, most=256 if equalized else 10)


def test_a_crop_of_what_was_moved_away_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = operations_of(((ops.TRANSLATE_X, 1.2), ROTATE), IMAGES)
    monkeypatch.setattr(stream_module, "draw_operations", lambda *_: drawn)
    images = {f"train/a/{number:02d}.png": smooth(90, 60, seed=number) for number in range(IMAGES)}
    batch = batch_of(build_catalog(str(write_images(tmp_path, images)), "train", None))
    assert np.abs(unnormalised(batch.images) - np.array(FILL)[:, None, None]).max() < 1


def plans(number: int) -> tuple[NDArray[np.int32], NDArray[np.int64], Operations]:
    indices, sizes = np.arange(number), np.tile(np.array([375, 500]), (number, 1))
    crops = draw_crops(SEED, EPOCH, indices, sizes, SETTINGS).boxes
    return crops, sizes, draw_operations(SEED, EPOCH, indices, SETTINGS)


def test_what_is_decoded_is_inside_the_image_and_no_more_than_needed() -> None:
    crops, sizes, operations = plans(3000)
    parts = parts_needed(crops, sizes, operations)
    low, high = parts.boxes[..., :2], parts.boxes[..., :2] + parts.boxes[..., 2:]
    assert (low >= 0).all()
    assert (parts.boxes[..., 2:] > 0).all()
    assert (high <= sizes[:, None]).all()
    assert (parts.boxes[:, -1] == crops).all()
    whole = (parts.decoded[:, 2:] == sizes).all(axis=1)
    counted = np.isin(operations.kinds[:, 0], ops.HISTOGRAM)
    assert whole[counted].all()
    pointwise = ~np.isin(operations.kinds, (*ops.GEOMETRIC, *ops.HISTOGRAM, ops.SHARPNESS)).any(axis=1)
    assert (parts.decoded[pointwise] == crops[pointwise]).all()
    decoded = (parts.decoded[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    cut = (crops[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    assert cut < decoded < 0.75


def test_what_is_not_decoded_makes_no_difference() -> None:
    """Every crop from the part that was bounded, and cut from the whole image after its operations."""
    crops, sizes, operations = plans(60)
    image = torch.from_numpy(np.asarray(smooth(500, 375, seed=1)).copy()).permute(2, 0, 1)[None]
    parts = parts_needed(crops, sizes, operations)
    wholes = parts_needed(np.tile(np.array([0, 0, 375, 500], np.int32), (len(crops), 1)), sizes, operations)
    for place, (top, left, height, width) in enumerate(crops.tolist()):
        alone = operations.of(place)
        ours = augment_part(part_of(image, parts, place), alone, parts.of(place))
        whole = augment_part(part_of(image, wholes, place), alone, wholes.of(place))
        expected = whole[..., top : top + height, left : left + width]
        assert (ours.int() - expected.int()).abs().float().mean() < 0.02


def part_of(image: torch.Tensor, parts: Parts, place: int) -> torch.Tensor:
    top, left, height, width = parts.decoded[place].tolist()
    return image[..., top : top + height, left : left + width]
