"""The published order of augmentation, with our random draws in place of its own.

The published transforms flip the image, apply RandAugment to the whole image and its label map, and crop it.
Pixels, maps and crops are compared with those of TrainLoader with --randaugment-on image.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data import loader as loader_module
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import CropFlip, draw_crops
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.token_labels.geometry import WHOLE
from horovod_volo.token_labels.source import open_labels
from tests.published.checkouts import PublishedCode

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from coded_images import only_batch, smooth, unnormalised, write_images
from published_augment import NAMES, SPELLING

SEED, EPOCH, SIDE, CELLS, IMAGES = 8, 3, 64, 18, 48
SETTINGS = Data(
    batch_size=IMAGES,
    aa=SPELLING,
    vflip=0.3,
    train_interpolation="bicubic",
    reprob=0.0,
    randaugment_on="image",
)
PHOTOGRAPHS, SQUARES = (200, 150), (180, 180)  # width, height


def cell_numbers() -> NDArray[np.float32]:
    """Return a map (1, CELLS, CELLS) whose cells are numbered from 1; 0 is the number of filled cells."""
    return np.arange(1, CELLS**2 + 1, dtype=np.float32).reshape(1, CELLS, CELLS)


def write_set(folder: Path, size: tuple[int, int]) -> Path:
    """Save images and, in the published format, a label map of numbered cells for each."""
    write_images(folder, {f"train/a/{n:02d}.png": smooth(*size, seed=n) for n in range(IMAGES)})
    (folder / "maps" / "a").mkdir(parents=True)
    numbers = torch.from_numpy(cell_numbers()).half()
    for n in range(IMAGES):
        torch.save(torch.stack([numbers, numbers]), folder / "maps" / "a" / f"{n:02d}.pt")
    return folder


def our_batch(folder: Path, settings: Data) -> tuple[Any, TrainBatch]:
    catalog = build_catalog(str(folder), "train", None)
    catalog.classes = ("a", *(f"cell {number}" for number in range(1, CELLS**2 + 1)))
    batch = only_batch(
        catalog,
        open_labels(str(folder / "maps"), catalog, None, WHOLE),  # as the published training reads them
        settings,
        side=SIDE,
        seed=SEED,
        epoch=EPOCH,
    )
    return catalog, batch


@contextmanager
def use_draws(transform: Any, crop_flip: CropFlip, drawn: Operations) -> Iterator[None]:
    """Replace the draws of the published transforms by ours for one image."""
    steps = {type(step).__name__: step for step in transform.transforms}
    steps["RandomHorizontalFlipWithLabel"].p = float(crop_flip.flip_horizontal[0])
    steps["RandomVerticalFlipWithLabel"].p = float(crop_flip.flip_vertical[0])
    steps["RandomResizedCropAndInterpolationWithCoords"].get_params = lambda *_: crop_flip.boxes[0].tolist()
    operations = {operation.name: operation for operation in steps["RandAugment"].ops}
    chosen = [
        fixed_operation(operations[NAMES[kind]], float(amount), bool(bicubic))
        for kind, amount, bicubic in zip(drawn.kinds[0], drawn.arguments[0], drawn.bicubic[0], strict=True)
        if kind != ops.NONE
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "choice", lambda *_, **__: chosen)
        yield


def fixed_operation(operation: Any, amount: float, bicubic: bool) -> Any:
    """Return a published operation that is always applied, with this argument if it has one."""
    kind = next(kind for kind, name in NAMES.items() if name == operation.name)
    whole = kind in (ops.POSTERIZE, ops.SOLARIZE_ADD)
    takes_none = kind in (ops.AUTO_CONTRAST, ops.EQUALIZE, ops.INVERT)

    def apply(image: Image.Image, label_map: torch.Tensor) -> tuple[Image.Image, torch.Tensor]:
        operation.prob = 1.0
        operation.level_fn = None if takes_none else lambda *_: (int(amount) if whole else amount,)
        operation.kwargs["resample"] = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        return operation(image, label_map)

    return apply


def published_sample(
    published: PublishedCode, path: str, index: int, drawn: Operations
) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """Return the image (3, side, side) and the map [3, 1, cells, cells] of the published transforms."""
    transform = published.transforms.create_token_label_transform(
        SIDE,
        is_training=True,
        use_prefetcher=True,
        hflip=0.5,
        vflip=0.3,
        auto_augment=SPELLING,
        interpolation="bicubic",
    )
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    crop_flip = draw_crops(SEED, EPOCH, np.array([index]), np.array([[image.height, image.width]]), SETTINGS)
    numbers = torch.from_numpy(cell_numbers())
    with use_draws(transform, crop_flip, drawn):
        pixels, label_map = transform(image, torch.stack([numbers, numbers]))
    return pixels, label_map


def differences(
    published: PublishedCode, folder: Path, settings: Data
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean difference of each image from the published one, and the image's operations."""
    catalog, batch = our_batch(folder, settings)
    found, kinds = [], []
    for position, index in enumerate(batch.indices.tolist()):
        drawn = draw_operations(SEED, EPOCH, np.array([index]), settings)
        pixels, label_map = published_sample(published, catalog.location(index), index, drawn)
        found.append(np.abs(unnormalised(batch.images)[position] - pixels).mean())
        kinds.append(drawn.kinds[0])
        assert torch.allclose(label_map[2, 0, 0, :4], batch.labels.maps.boxes[position])
    return np.array(found), np.array(kinds)


def test_pixels_and_crops_are_the_published_ones(published: PublishedCode, tmp_path: Path) -> None:
    folder = write_set(tmp_path, PHOTOGRAPHS)
    before_crop, kinds = differences(published, folder, SETTINGS)
    assert before_crop.mean() < 0.5  # of 255 levels
    assert before_crop.max() < 3  # operations that stretch colours enlarge small differences
    moved = np.isin(kinds, ops.GEOMETRIC).any(axis=1)
    assert moved.sum() > IMAGES / 5
    # The measure must detect the other order.
    after_crop, _ = differences(published, folder, Data(**(vars(SETTINGS) | {"randaugment_on": "crop"})))
    assert after_crop[moved].mean() > 10
    assert after_crop[moved].mean() > 10 * before_crop[moved].mean()


@pytest.mark.parametrize("amount", [0.35, -0.23])
@pytest.mark.parametrize("kind", ops.GEOMETRIC)
def test_label_maps_are_the_published_ones(published, tmp_path, monkeypatch, kind, amount):
    """Up to one cell, because the published code maps corners of cells instead of centres, half a cell away.

    The images are square, because the published code rotates and shears all maps as those of square images.
    """
    argument = 70 * amount if kind == ops.ROTATE else amount
    one = Operations(np.array([[kind]]), np.array([[argument]], np.float32), np.array([[True]]))
    every = Operations(*(np.tile(part, (IMAGES, 1)) for part in (one.kinds, one.arguments, one.bicubic)))
    monkeypatch.setattr(loader_module, "draw_operations", lambda *_: every)
    catalog, batch = our_batch(write_set(tmp_path, SQUARES), SETTINGS)
    for position, index in enumerate(batch.indices.tolist()[:8]):
        _, label_map = published_sample(published, catalog.location(index), index, one)
        ours, theirs = batch.labels.maps.ids[position, 0].numpy(), label_map[1, 0].numpy().astype(np.int64)
        in_both = (batch.labels.maps.scores[position, 0].numpy() != 0) & (label_map[0, 0].numpy() != 0)
        assert in_both.mean() > 0.35
        far = np.abs(np.stack(np.divmod(ours - 1, CELLS)) - np.stack(np.divmod(theirs - 1, CELLS)))
        assert far[:, in_both].max() <= 1
        # Cells with a label in only one of the two are at the edge of the filled part.
        in_one = (batch.labels.maps.scores[position, 0].numpy() != 0) ^ (label_map[0, 0].numpy() != 0)
        assert in_one.mean() < 0.2
