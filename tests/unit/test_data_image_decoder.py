"""Pillow's pipelines give DALI's pixels up to rounding, for every loader."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_samples import rank_alone
from coded_images import PLAIN, smooth, write_images
from image_loaders import eval_loader, evaluated_images, train_loader
from PIL import Image, features
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.config.task_settings import Detection, Segmentation
from horovod_volo.core.errors import UserError
from horovod_volo.data import image_decoder as decoders
from horovod_volo.data.image_decoder import (
    IMAGENET_NORMALIZATION,
    DecoderName,
    describe_decoder,
    image_decoder,
)
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.box_list import list_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.scene_list import find_layout, list_scenes
from horovod_volo.dense.scene_loader import SceneTrainLoader
from horovod_volo.pack import main as pack

CPU = torch.device("cpu")
STD = torch.tensor(IMAGENET_NORMALIZATION.std).view(3, 1, 1)
SIDE, IMAGES = 64, 12
ORDER = OrderOfRank(seed=3, rank=0, size=1, accumulation=1)


def noisy(width: int, height: int, seed: int) -> Image.Image:
    """Return an image with as much detail as a photograph."""
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    pixels = np.asarray(smooth(width, height, seed)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        images = {
            f"{split}/{'ab'[n % 2]}/{n:02d}.jpg": noisy(90 + 17 * n, 240 - 11 * n, n) for n in range(IMAGES)
        }
        write_images(folder, images, quality=90)
    return folder


def levels(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the differences of normalised images in levels of a byte."""
    return (ours - theirs).abs() * STD * 255


def train_images(folder: Path, decoder: DecoderName, **settings: Any) -> Tensor:
    catalog = build_catalog(str(folder), "train", None)
    data = Data(batch_size=4, image_decoder=decoder, **settings)
    with closing(train_loader(catalog, data, image_size=SIDE)) as loader:
        return torch.cat([batch.images for batch in loader.batches(1, 0)])


@pytest.mark.parametrize("on", ["crop", "image"])
def test_training_images(folder: Path, on: str) -> None:
    """The plan is the same; only decoding differs, which operations on colours may enlarge."""
    dali, pillow = (train_images(folder, name, randaugment_on=on) for name in ("dali", "pillow"))
    difference = levels(pillow, dali).mean(dim=(1, 2, 3))
    assert len(difference) == IMAGES
    assert (
        float(difference.median()) < 0.01
    )  # measured: 0, but libraries of other versions may round otherwise
    assert float(difference.max()) < 3
    plain = [train_images(folder, name, randaugment_on=on, **PLAIN) for name in ("dali", "pillow")]
    assert float(levels(*plain).max()) < 1.01


def evaluated(folder: Path, decoder: DecoderName, **changes: Any) -> Tensor:
    catalog = build_catalog(str(folder), "val", None)
    data = Data(batch_size=5, image_decoder=decoder)
    return evaluated_images(catalog, data, image_size=SIDE, **changes)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow is without AVIF")
def test_avif_under_the_name_of_a_jpeg(tmp_path: Path) -> None:
    """As in folders of images from the web; packed, it is found in the shard too."""
    for split in ("train", "val"):
        for number in range(2):
            file = tmp_path / "data" / split / "a" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            noisy(90, 70, number).save(file, "AVIF")
    assert pack([str(tmp_path / "data"), str(tmp_path / "packed"), "--workers", "1"]) == 0
    for folder in (tmp_path / "data", tmp_path / "packed"):
        dali, pillow = (evaluated(folder, name) for name in ("dali", "pillow"))
        assert float(levels(pillow, dali).max()) < 2.01
        assert float(dali.std()) > 0.1


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("crop_pct", "crops"), [(0.9, 1), (1.15, 1), (0.8, 10)])
def test_evaluation_images(folder: Path, interpolation: str, crop_pct: float, crops: int) -> None:
    dali, pillow = (
        evaluated(folder, name, interpolation=interpolation, crop_pct=crop_pct, crops=crops)
        for name in ("dali", "pillow")
    )
    difference = levels(pillow, dali)
    assert float(difference.mean()) < 0.2  # measured: 0.11 to 0.16 levels of 255
    assert float(difference.max()) < 2.01


def test_scenes_and_boxes(tmp_path: Path) -> None:
    make_scene_set(tmp_path / "scenes", train=6, val=1, side=96)
    root = tmp_path / "scenes"
    images = []
    for name in ("dali", "pillow"):
        data = Data(batch_size=3, image_decoder=name)
        alone = (ORDER, rank_alone(IMAGENET_NORMALIZATION))
        plain = Segmentation(scene_size=(160.0, 80.0), photometric=False)
        scenes = SceneTrainLoader(list_scenes(root, find_layout(root), "train"), data, plain, 64, *alone)
        listed = list_boxes(root, "train")
        boxes = BoxTrainLoader(listed, data, Detection(), SIDE, *alone)
        with closing(scenes), closing(boxes):
            images.append([torch.cat([b.images for b in each.batches(0, 0)]) for each in (scenes, boxes)])
    for number, largest in ((0, 1.01), (1, 1.01)):
        difference = levels(images[1][number], images[0][number])
        assert len(difference) == 6
        assert float(difference.mean()) < 0.01
        assert float(difference.max()) < largest


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
def test_order_repetition_and_threads(folder: Path, decoder: DecoderName) -> None:
    """A loader can be left in the middle and used again, and its threads end with it."""
    before = threading.active_count()
    loader = eval_loader(build_catalog(str(folder), "val", None), Data(batch_size=2, image_decoder=decoder))
    first = next(iter(loader))
    batches = list(loader)
    assert [index for batch in batches for index in batch.indices] == list(range(IMAGES))
    assert torch.equal(first.images, batches[0].images)
    loader.close()
    assert threading.active_count() == before


def test_the_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_decoder() == "images read by DALI"
    assert describe_decoder("pillow") == "images read by Pillow (--image-decoder pillow)"
    assert decoders.decoder_messages() == []
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert not decoders.dali_is_installed()
    assert describe_decoder() == "images read by Pillow (DALI is not installed)"
    assert decoders.decoder_messages() == [describe_decoder()]
    assert image_decoder().name == "pillow"
    with pytest.raises(UserError, match=r"pip install 'horovod_volo\[dali\]'"):
        image_decoder("dali")
