"""All augmentation of a training image, against the same operations by Pillow, image by image."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_images import PLAIN, only_batch, smooth, unnormalised, write_images
from PIL import Image
from pillow_augment import augmented_by_pillow
from published_augment import FILL, NAMES, timm_augment

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import Labels
from horovod_volo.data import train_transform
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops, warp_maps
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.image_decoder import build_train_pipeline, resizing_inputs
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.prefetcher import BatchPrefetcher, ImageThreadPool
from horovod_volo.data.train_transform import PendingTrainBatch, TrainTransform

SEED, EPOCH, SIDE, IMAGES = 3, 2, 64, 60
RESIZED = 12
SETTINGS = Data(batch_size=IMAGES, hflip=0.5, vflip=0.3)  # the rest as published
SIZES = [(160, 110), (97, 151), (64, 64), (210, 145)]  # width, height


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
def test_augmented_images_equal_pillows(tmp_path: Path, randaugment_on: Any) -> None:
    settings = replace(SETTINGS, randaugment_on=randaugment_on)
    images = {f"train/a/{n:02d}.jpg": smooth(*SIZES[n % len(SIZES)], seed=n) for n in range(IMAGES)}
    catalog = build_catalog(str(write_images(tmp_path, images, quality=95)), "train", None)
    batch = only_batch(catalog, None, settings, side=SIDE, seed=SEED, epoch=EPOCH)
    boxes = draw_erasures(SEED, EPOCH, batch.indices, settings, SIDE).boxes
    colours = unnormalised(batch.images)
    differences, erased = [], 0
    for position, index in enumerate(batch.indices):
        drawn = draw_operations(SEED, EPOCH, np.array([index]), settings)
        path = catalog.location(index)
        theirs = augmented_by_pillow(path, int(index), settings, drawn, seed=SEED, epoch=EPOCH, side=SIDE)
        unerased = np.ones((SIDE, SIDE), dtype=np.bool_)
        for top, left, height, width in boxes[position]:
            unerased[top : top + height, left : left + width] = False
        difference = np.abs(colours[position].transpose(1, 2, 0) - theirs.astype(float))
        differences.append(difference[unerased].mean())
        erased += not unerased.all()
        if not unerased.all():  # erased pixels are noise
            assert np.abs(colours[position][:, ~unerased].std() - 57) < 15
    assert 0.1 < erased / IMAGES < 0.45
    operated = draw_operations(SEED, EPOCH, batch.indices, settings).kinds
    assert len(np.unique(operated)) > len(NAMES) - 3  # nearly all operations occur
    assert np.mean(differences) < 1.0  # of 255 levels
    assert max(differences) < 8  # operations that stretch colours enlarge small differences


@pytest.mark.parametrize("amount", [0.35, -0.23])
@pytest.mark.parametrize("kind", ops.GEOMETRIC)
def test_moved_label_maps_equal_pillows_moved_images(kind: ops.Operation, amount: float) -> None:
    """The crop is the whole image, so map and image coincide; the colour of a pixel is its cell's number."""
    cells = 14
    argument = 70 * amount if kind == ops.ROTATE else amount
    numbers = np.arange(1, cells**2 + 1).reshape(cells, cells)
    operations = Operations(np.array([[kind]]), np.array([[argument]], np.float32), np.array([[False]]))
    whole = np.array([[0, 0, 1, 1]], np.float32)
    scores = numbers[None, None].astype(np.float16)
    moved, ids = warp_maps(
        scores, numbers[None, None].astype(np.int32), whole, operations, np.ones((1, 2)), whole
    )
    picture = np.repeat(numbers[:, :, None], 3, axis=2).astype(np.uint8)
    theirs = timm_augment(kind, picture, argument, bicubic=False, nearest=True)
    shown_by_pillow = ~(theirs == FILL).all(axis=-1)
    assert 0.3 < shown_by_pillow.mean() < 1
    shown = moved[0, 0] != 0
    assert shown[shown_by_pillow].all()
    assert (shown & ~shown_by_pillow).sum() <= cells  # cells on the edge of the image
    assert (ids[0, 0][shown_by_pillow] == theirs[:, :, 0][shown_by_pillow]).all()
    assert (moved[0, 0][shown] == ids[0, 0][shown]).all()


def encoded(image: Image.Image) -> np.ndarray:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=95)
    return np.frombuffer(data.getvalue(), dtype=np.uint8)


def batch_resized_by(*, dali: bool) -> torch.Tensor:
    settings = Data(**(PLAIN | {"train_interpolation": "random", "vflip": 0.5, "aa": "rand-m9-inc1"}))
    pictures = [smooth(90 + 7 * number, 120 - 3 * number, seed=number) for number in range(RESIZED)]
    sizes = np.array([(picture.height, picture.width) for picture in pictures])
    indices = np.arange(RESIZED)
    crop_flip = draw_crops(4, 0, indices, sizes, settings)
    assert 0 < crop_flip.bicubic.sum() < RESIZED
    boxes = crop_flip.stored(crop_flip.boxes, sizes)
    inputs = ([encoded(picture) for picture in pictures], list(boxes[:, :2]), list(boxes[:, 2:]))
    drawn = draw_operations(4, 0, indices, settings), draw_erasures(4, 0, indices, settings, SIDE)
    device = torch.device("cpu")
    with closing(ImageThreadPool(2, "transform")) as threads:
        transform = TrainTransform(
            settings, image_size=SIDE, seed=4, device=device, resized=dali, threads=threads
        )
        build = partial(
            build_train_pipeline, image_size=SIDE, batch=RESIZED, device=device, threads=1, resize=dali
        )
        prefetcher = BatchPrefetcher(build, device, 1, lambda index: None, transform)
        flips = (crop_flip.flip_horizontal, crop_flip.flip_vertical, crop_flip.bicubic)
        inputs += resizing_inputs(*flips) if dali else ()
        labels = Labels(torch.zeros(RESIZED))
        pending = PendingTrainBatch(indices, inputs, labels, indices, crop_flip, *drawn)
        ((_, images),) = prefetcher.batches([lambda: pending])
        prefetcher.close()
    return images


def test_dali_and_torch_give_the_same_images() -> None:
    ours, theirs = batch_resized_by(dali=False), batch_resized_by(dali=True)
    difference = (ours - theirs).abs().mean(dim=(1, 2, 3)) * 255 * 0.225
    # Operations that use a histogram or discard bits can enlarge differences of rounding in a few images.
    assert float(difference.median()) < 1
    assert float(difference.max()) < 6


def test_crops_are_the_same_transformed_together_and_one_by_one(monkeypatch) -> None:
    together = batch_resized_by(dali=False)
    monkeypatch.setattr(train_transform, "_SMALL_SIDE", 0)
    assert torch.equal(together, batch_resized_by(dali=False))
