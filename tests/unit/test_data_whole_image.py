"""RandAugment before the crop: pixels equal Pillow's on the whole image, and only the needed part is decoded.

The batches come from TrainLoader, with DALI; each crop shows another part of its moved image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_images import only_batch, smooth, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image
from pillow_augment import augmented_by_pillow

from horovod_volo.config.data_settings import Data
from horovod_volo.data import loader as loader_module
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import Parts, augment_part, parts_needed
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.images.catalog import Catalog, build_catalog

SEED, EPOCH, SIDE, IMAGES = 5, 1, 64, 12
SETTINGS = Data(batch_size=IMAGES, hflip=0.5, vflip=0.5, reprob=0.0, randaugment_on="image")
SIZES = [(160, 100), (97, 151), (64, 64), (210, 145)]  # width, height
HISTOGRAM = tuple(each for each in ops.RAND_V1 if each.kind is ops.Kind.HISTOGRAM)
Steps = tuple[tuple[ops.Operation, float], ...]
ROTATE, SHIFT = (ops.ROTATE, -22.0), (ops.TRANSLATE_X, 0.3)
SEQUENCES = [
    ((ops.SHEAR_X, -0.29),),
    ((ops.TRANSLATE_Y, -0.41),),
    (ROTATE, SHIFT),
    (SHIFT, (ops.INVERT, 0.0), (ops.SHEAR_Y, -0.25)),
    (ROTATE, (ops.AUTO_CONTRAST, 0.0)),
    ((ops.CONTRAST, 0.3), ROTATE),
    (SHIFT, (ops.EQUALIZE, 0.0), ROTATE),
    ((ops.SHARPNESS, 1.8), (ops.SHARPNESS, 0.3), SHIFT),
]


def operations_of(steps: Steps, batch: int, *, bicubic: bool = True) -> Operations:
    kinds = np.tile(np.array([kind for kind, _ in steps], dtype=np.int64), (batch, 1))
    arguments = np.tile(np.array([amount for _, amount in steps], dtype=np.float32), (batch, 1))
    return Operations(kinds, arguments, np.full(kinds.shape, bicubic))


def batch_of(catalog: Catalog) -> Any:
    return only_batch(catalog, None, SETTINGS, side=SIDE, seed=SEED, epoch=EPOCH)


def assert_as_pillow(
    folder: Path, pictures: list[Image.Image], drawn: Operations, *, mean: float = 0.5, most: int = 10
) -> None:
    """Compare a batch with Pillow's images; `drawn` are the operations that replace the random ones."""
    images = {f"train/a/{number:02d}.png": picture for number, picture in enumerate(pictures)}
    catalog = build_catalog(str(write_images(folder, images)), "train", None)
    batch = batch_of(catalog)
    for shown, index in zip(unnormalised(batch.images), batch.indices.tolist(), strict=True):
        path = catalog.location(index)
        theirs = augmented_by_pillow(
            path, index, SETTINGS, drawn.of(slice(0, 1)), seed=SEED, epoch=EPOCH, side=SIDE
        )
        difference = np.abs(shown.transpose(1, 2, 0) - theirs)
        assert difference.mean() < mean
        # Next to filled pixels the bicubic resize overshoots; torch and Pillow clip the overshoot in
        # different passes of the two.
        assert difference.max() < most


@pytest.mark.parametrize("bicubic", [True, False])
@pytest.mark.parametrize("steps", SEQUENCES)
def test_sequences_of_operations_on_the_whole_image(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[tuple[ops.Operation, float], ...],
    bicubic: bool,
) -> None:
    """Operations that use the histogram use that of the whole image after the previous operations."""
    drawn = operations_of(steps, IMAGES, bicubic=bicubic)
    monkeypatch.setattr(loader_module, "draw_operations", lambda *_: drawn)
    pictures = [smooth(*SIZES[number % len(SIZES)], seed=number) for number in range(IMAGES)]
    # Equalizing widens the distance of colours that few pixels have, and with it differences of rounding.
    equalized = any(kind == ops.EQUALIZE for kind, _ in steps)
    assert_as_pillow(tmp_path, pictures, drawn, mean=1.0 if equalized else 0.5, most=256 if equalized else 10)


def test_a_crop_outside_the_moved_image_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = operations_of(((ops.TRANSLATE_X, 1.2), ROTATE), IMAGES)
    monkeypatch.setattr(loader_module, "draw_operations", lambda *_: drawn)
    images = {f"train/a/{number:02d}.png": smooth(90, 60, seed=number) for number in range(IMAGES)}
    batch = batch_of(build_catalog(str(write_images(tmp_path, images)), "train", None))
    assert np.abs(unnormalised(batch.images) - np.array(FILL)[:, None, None]).max() < 1


def random_crops(number: int) -> tuple[NDArray[np.int32], NDArray[np.int64], Operations]:
    indices, sizes = np.arange(number), np.tile(np.array([375, 500]), (number, 1))
    crops = draw_crops(SEED, EPOCH, indices, sizes, SETTINGS).boxes
    return crops, sizes, draw_operations(SEED, EPOCH, indices, SETTINGS)


def test_the_decoded_part_is_inside_the_image_and_no_larger_than_needed() -> None:
    crops, sizes, operations = random_crops(3000)
    parts = parts_needed(crops, sizes, operations)
    low, high = parts.boxes[..., :2], parts.boxes[..., :2] + parts.boxes[..., 2:]
    assert (low >= 0).all()
    assert (parts.boxes[..., 2:] > 0).all()
    assert (high <= sizes[:, None]).all()
    assert (parts.boxes[:, -1] == crops).all()
    whole = (parts.decoded[:, 2:] == sizes).all(axis=1)
    counted = np.isin(operations.kinds[:, 0], HISTOGRAM)
    assert whole[counted].all()
    pointwise = ~np.isin(operations.kinds, (*ops.GEOMETRIC, *HISTOGRAM, ops.SHARPNESS)).any(axis=1)
    assert (parts.decoded[pointwise] == crops[pointwise]).all()
    decoded = (parts.decoded[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    cut = (crops[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    assert cut < decoded < 0.75


def test_an_operation_of_a_plugin_counts_whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.Operation(1000, "Own", ops.Kind.HISTOGRAM, ops.no_argument, ops.EQUALIZE.function)
    monkeypatch.setitem(ops.OPERATIONS, 1000, own)
    crops, sizes, _ = random_crops(4)
    found, expected = (
        parts_needed(crops, sizes, operations_of(((kind, 0.0),), 4)) for kind in (own, ops.EQUALIZE)
    )
    assert (found.decoded == expected.decoded).all()
    assert (found.decoded[:, 2:] == sizes).all()


def test_pixels_that_are_not_decoded_do_not_matter() -> None:
    """Each crop is computed from its decoded part, and cut from the whole image after its operations."""
    crops, sizes, _ = random_crops(60)
    operations = draw_operations(SEED, EPOCH, np.arange(60), SETTINGS)
    image = torch.from_numpy(np.asarray(smooth(500, 375, seed=1)).copy()).permute(2, 0, 1)[None]
    parts = parts_needed(crops, sizes, operations)
    whole_parts = parts_needed(
        np.tile(np.array([0, 0, 375, 500], np.int32), (len(crops), 1)), sizes, operations
    )
    for position, (top, left, height, width) in enumerate(crops.tolist()):
        rows = slice(position, position + 1)
        ours = augment_part(part_of(image, parts, position), operations.of(rows), parts.of(rows))
        whole = augment_part(part_of(image, whole_parts, position), operations.of(rows), whole_parts.of(rows))
        expected = whole[..., top : top + height, left : left + width]
        assert (ours.int() - expected.int()).abs().float().mean() < 0.02


def part_of(image: torch.Tensor, parts: Parts, position: int) -> torch.Tensor:
    top, left, height, width = parts.decoded[position].tolist()
    return image[..., top : top + height, left : left + width]
