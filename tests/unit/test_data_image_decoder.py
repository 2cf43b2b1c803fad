"""Pillow's pipelines give DALI's pixels up to rounding, in a network's colours and the sizes of the files."""

import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_samples import rank_alone
from coded_images import (
    PLAIN,
    encoded,
    eval_loader,
    evaluated_images,
    noisy,
    smooth,
    train_loader,
    unnormalised,
    write_images,
)
from PIL import Image, features
from torch import Tensor

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config, Model, Run
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.errors import UserError
from horovod_volo.data import image_decoder as decoders
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION, DecoderName, Normalization
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.reading import UNDECODABLE, jpeg_size, open_image
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.box_list import list_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.scene_list import find_layout, list_scenes
from horovod_volo.dense.scene_loader import SceneTrainLoader
from horovod_volo.engine.classification import build_loaders
from horovod_volo.engine.classification_data import Images
from horovod_volo.models.weights_header import statistics_of_weights
from horovod_volo.pack import main as pack

CPU = torch.device("cpu")
STD = torch.tensor(IMAGENET_NORMALIZATION.std).view(3, 1, 1)
SIDE, IMAGES = 64, 12


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
    # Measured: 0, but libraries of other versions may round otherwise.
    assert float(difference.median()) < 0.01
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
        images = {f"{split}/a/{number}.jpg": noisy(90, 70, number) for number in range(2)}
        write_images(tmp_path / "data", images, format="AVIF")
    assert pack([str(tmp_path / "data"), str(tmp_path / "packed"), "--workers", "1"]) == 0
    for folder in (tmp_path / "data", tmp_path / "packed"):
        dali, pillow = (evaluated(folder, name) for name in ("dali", "pillow"))
        assert float(levels(pillow, dali).max()) < 2.01
        assert float(dali.std()) > 0.1


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_pct", [0.9, 1.15])
def test_evaluation_images(folder: Path, interpolation: str, crop_pct: float) -> None:
    how = {"interpolation": interpolation, "crop_pct": crop_pct}
    dali, pillow = (evaluated(folder, name, **how) for name in ("dali", "pillow"))
    difference = levels(pillow, dali)
    assert float(difference.mean()) < 0.2  # measured: 0.11 to 0.16 levels of 255
    assert float(difference.max()) < 2.01


def test_scenes_and_boxes(tmp_path: Path) -> None:
    make_scene_set(tmp_path / "scenes", train=6, val=1, side=96)
    root = tmp_path / "scenes"
    images = []
    for name in ("dali", "pillow"):
        plain = Segmentation(scene_size=(160.0, 80.0), photometric=False)
        data = Data(batch_size=3, image_decoder=name)
        alone = rank_alone(data=data, run=Run(seed=3), model=Model(img_size=SIDE), segmentation=plain)
        scenes = SceneTrainLoader(list_scenes(root, find_layout(root), "train"), alone)
        boxes = BoxTrainLoader(list_boxes(root, "train"), alone)
        with closing(scenes), closing(boxes):
            images.append([torch.cat([b.images for b in each.batches(0, 0)]) for each in (scenes, boxes)])
    for dali, pillow in zip(*images, strict=True):
        difference = levels(pillow, dali)
        assert len(difference) == 6
        assert float(difference.mean()) < 0.01
        assert float(difference.max()) < 1.01


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
    assert decoders.describe_decoder() == "images read by DALI"
    assert decoders.describe_decoder("pillow") == "images read by Pillow (--image-decoder pillow)"
    assert decoders.decoder_messages() == []
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert not decoders.dali_is_installed()
    assert decoders.describe_decoder() == "images read by Pillow (DALI is not installed)"
    assert decoders.decoder_messages() == [decoders.describe_decoder()]
    assert decoders.image_decoder().name == "pillow"
    with pytest.raises(UserError, match=r"pip install 'horovod_volo\[dali\]'"):
        decoders.image_decoder("dali")


OWN = Normalization((0.5, 0.25, 0.0), (0.5, 0.125, 1.0))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    names = [f"{split}/a/{number}.png" for split in ("train", "val") for number in range(4)]
    return write_images(tmp_path, {name: smooth(60, 50, seed=number) for number, name in enumerate(names)})


def batch_of(small: Path, split: str, **colours: Any) -> torch.Tensor:
    settings, catalog = Data(batch_size=4, **PLAIN), build_catalog(str(small), split, None)
    if split == "val":
        return evaluated_images(catalog, settings, crop_pct=0.9, **colours)
    with closing(train_loader(catalog, settings, seed=Run().seed, **colours)) as loader:
        (batch,) = loader.batches(0, 0)
    return batch.images


def normalised(images: torch.Tensor, colours: Normalization) -> torch.Tensor:
    """Replace the normalisation with ImageNet's mean and std by another one."""
    shown = torch.from_numpy(unnormalised(images)) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in colours)
    return (shown - mean) / std


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_loader_normalises_with_the_given_mean_and_std(small: Path, split: str) -> None:
    usual, others = batch_of(small, split), batch_of(small, split, normalization=OWN)
    assert torch.equal(usual, batch_of(small, split, normalization=IMAGENET_NORMALIZATION))
    torch.testing.assert_close(others.double(), normalised(usual, OWN).double(), atol=1e-5, rtol=1e-5)
    assert (others - usual).abs().mean() > 0.1


@pytest.mark.parametrize(
    ("model", "own", "colours"),
    [
        ("volo_demo", {}, IMAGENET_NORMALIZATION),
        ("vit_tiny_patch16_224", {}, Normalization((0.5,) * 3, (0.5,) * 3)),
        ("volo_demo", {"mean": OWN.mean, "std": OWN.std}, OWN),
    ],
)
def test_a_run_shows_its_networks_colours_or_its_own(small, model, own, colours):
    images = Images(*(build_catalog(str(small), split, None) for split in ("train", "val")), None)
    settings = Data(batch_size=4, crop_pct=0.9, **own, **PLAIN)
    config = Config(model=Model(model=model, img_size=32), data=settings)
    train, build_eval_loader = build_loaders(config, World.single(), images, RankResources(CPU, 1, 1))
    held_out = build_eval_loader(images.held_out)
    (trained,), (evaluated,) = train.batches(0, 0), held_out
    train.close()
    held_out.close()
    assert torch.equal(evaluated.images, batch_of(small, "val", normalization=colours))
    assert torch.equal(trained.images, batch_of(small, "train", normalization=colours))


def test_the_statistics_of_a_run_are_those_of_flags_that_repeat_them() -> None:
    run = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.3]}  # as resolved.toml gives them
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.3)
    assert statistics_of_weights("timm:volo_d1", "volo_d1", run, mean, std) == (mean, std)
    with pytest.raises(UserError, match="was trained with --mean"):
        statistics_of_weights("timm:volo_d1", "volo_d1", run, std, std)


PICTURE = smooth(60, 40, seed=1)
EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned; neither decoder obeys it
METADATA = {"exif": EXIF, "icc_profile": b"profile", "comment": b"words", "dpi": (72, 72)}
ORDINARY: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "baseline": (PICTURE, {}),
    "progressive": (PICTURE, {"progressive": True}),
    "gray": (PICTURE.convert("L"), {}),
    "with metadata": (PICTURE, METADATA),
    "with restarts": (PICTURE, {"restart_marker_rows": 1, "subsampling": 0}),
}
SEVERAL = {"form": "MPO", "save_all": True, "append_images": [PICTURE]}
OTHERS: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "CMYK": (PICTURE.convert("CMYK"), {}),
    "several": (PICTURE, SEVERAL),
}


@pytest.mark.parametrize("name", [*ORDINARY, *OTHERS])
def test_the_size_in_a_jpegs_segments_is_that_which_pillow_reads(name: str) -> None:
    """Also from damaged headers; only ordinary files need no Pillow."""
    picture, options = (ORDINARY | OTHERS)[name]
    whole, draws = encoded(picture, **options), np.random.default_rng(5)
    assert open_image(whole).size == (60, 40)
    assert jpeg_size(memoryview(whole)) == ((40, 60) if name in ORDINARY else None)
    header = whole.index(b"\xff\xda")  # where the pixels begin
    both = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[draws.integers(header)] = draws.integers(256)
        size = jpeg_size(memoryview(damaged))
        if size is None:
            continue
        try:
            with open_image(bytes(damaged)) as image:
                assert (size, image.format) == ((image.height, image.width), "JPEG")
                assert image.mode in ("RGB", "L")
        except UNDECODABLE:
            continue
        both += 1
    assert both > 500 or name in OTHERS
