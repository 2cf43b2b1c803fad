"""Everything a training image undergoes, beside the same plan carried out by Pillow alone, image by image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_images import only_batch, smooth, unnormalised, write_images
from pillow_plan import by_pillow
from published_augment import FILL, NAMES, timm_augment

from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.label_map_ops import moved_maps
from horovod_volo.data.augmentation.rand_augment import Operations, draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.images.catalog import Catalog, build_catalog

SEED, EPOCH, SIDE, IMAGES = 3, 2, 64, 60
SETTINGS = Data(batch_size=IMAGES, hflip=0.5, vflip=0.3)  # the rest as published
SIZES = [(160, 110), (97, 151), (64, 64), (210, 145)]  # width, height


def stream_batch(catalog: Catalog, settings: Data) -> Any:
    return only_batch(catalog, None, settings, side=SIDE, seed=SEED, epoch=EPOCH)


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
def test_a_plan_makes_what_pillow_makes_of_it(tmp_path: Path, randaugment_on: Any) -> None:
    settings = replace(SETTINGS, randaugment_on=randaugment_on)
    images = {f"train/a/{n:02d}.jpg": smooth(*SIZES[n % len(SIZES)], seed=n) for n in range(IMAGES)}
    catalog = build_catalog(str(write_images(tmp_path, images, quality=95)), "train", None)
    batch = stream_batch(catalog, settings)
    boxes = draw_erasures(SEED, EPOCH, batch.indices, settings, SIDE).boxes
    colours = unnormalised(batch.images)
    differences, erased = [], 0
    for place, index in enumerate(batch.indices):
        drawn = draw_operations(SEED, EPOCH, np.array([index]), settings)
        path = catalog.location(index)
        theirs = by_pillow(path, int(index), settings, drawn, seed=SEED, epoch=EPOCH, side=SIDE).astype(float)
        kept = np.ones((SIDE, SIDE), dtype=np.bool_)
        for top, left, height, width in boxes[place]:
            kept[top : top + height, left : left + width] = False
        difference = np.abs(colours[place].transpose(1, 2, 0) - theirs)
        differences.append(difference[kept].mean())
        erased += not kept.all()
        if not kept.all():  # noise, unlike any image
            assert np.abs(colours[place][:, ~kept].std() - 57) < 15
    assert 0.1 < erased / IMAGES < 0.45
    operated = draw_operations(SEED, EPOCH, batch.indices, settings).kinds
    assert len(np.unique(operated)) > len(NAMES) - 3  # nearly all operations took part
    assert np.mean(differences) < 1.0  # of 255
    assert max(differences) < 8  # where colours are stretched, small differences are too


@pytest.mark.parametrize("amount", [0.35, -0.23])
@pytest.mark.parametrize("kind", ops.GEOMETRIC)
def test_a_label_map_moves_as_pillow_moves_a_picture_of_it(kind: ops.Operation, amount: float) -> None:
    """Of whole images, so that the map is the picture's size; the number of a cell is its colour."""
    cells = 14
    argument = 70 * amount if kind == ops.ROTATE else amount
    numbers = np.arange(1, cells**2 + 1).reshape(cells, cells)
    operations = Operations(np.array([[kind]]), np.array([[argument]], np.float32), np.array([[False]]))
    whole = np.array([[0, 0, 1, 1]], np.float32)
    scores = numbers[None, None].astype(np.float16)
    moved, ids = moved_maps(scores, numbers[None, None].astype(np.int32), whole, operations)
    picture = np.repeat(numbers[:, :, None], 3, axis=2).astype(np.uint8)
    theirs = timm_augment(kind, picture, argument, bicubic=False, nearest=True)
    known = ~(theirs == FILL).all(axis=-1)
    assert 0.3 < known.mean() < 1
    shown = moved[0, 0] != 0
    assert shown[known].all()
    assert (shown & ~known).sum() <= cells  # a cell that the image's edge cuts belongs to it
    assert (ids[0, 0][known] == theirs[:, :, 0][known]).all()
    assert (moved[0, 0][shown] == ids[0, 0][shown]).all()
