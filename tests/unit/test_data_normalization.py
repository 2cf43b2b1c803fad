"""Images are normalised with the mean and std of their network, by default with ImageNet's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_images import PLAIN, smooth, unnormalised, write_images
from image_loaders import evaluated_images, train_loader

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config, Model, Run
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION, Normalization
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.engine.classification import build_loaders
from horovod_volo.engine.classification_data import Images
from horovod_volo.models.weights_header import statistics_of_weights

SIDE = 32
CPU = torch.device("cpu")
OTHERS = Normalization((0.5, 0.25, 0.0), (0.5, 0.125, 1.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = [f"{split}/a/{number}.png" for split in ("train", "val") for number in range(4)]
    return write_images(tmp_path, {name: smooth(60, 50, seed=number) for number, name in enumerate(names)})


def batch_of(folder: Path, split: str, **colours: Any) -> torch.Tensor:
    settings, catalog = Data(batch_size=4, **PLAIN), build_catalog(str(folder), split, None)
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
def test_a_loader_normalises_with_the_given_mean_and_std(folder: Path, split: str) -> None:
    usual, others = batch_of(folder, split), batch_of(folder, split, normalization=OTHERS)
    assert torch.equal(usual, batch_of(folder, split, normalization=IMAGENET_NORMALIZATION))
    torch.testing.assert_close(others.double(), normalised(usual, OTHERS).double(), atol=1e-5, rtol=1e-5)
    assert (others - usual).abs().mean() > 0.1


@pytest.mark.parametrize(
    ("model", "own", "colours"),
    [
        ("volo_demo", {}, IMAGENET_NORMALIZATION),
        ("vit_tiny_patch16_224", {}, Normalization((0.5,) * 3, (0.5,) * 3)),
        ("volo_demo", {"mean": OTHERS.mean, "std": OTHERS.std}, OTHERS),
    ],
)
def test_a_run_shows_its_networks_colours_or_its_own(
    folder: Path, model: str, own: dict[str, Any], colours: Normalization
) -> None:
    images = Images(*(build_catalog(str(folder), split, None) for split in ("train", "val")), None)
    settings = Data(batch_size=4, crop_pct=0.9, **own, **PLAIN)
    config = Config(model=Model(model=model, img_size=SIDE), data=settings)
    train, held_out = build_loaders(config, World.single(), images, RankResources(CPU, 1, 1))
    (trained,), (evaluated,) = train.batches(0, 0), held_out
    train.close()
    held_out.close()
    assert torch.equal(evaluated.images, batch_of(folder, "val", normalization=colours))
    assert torch.equal(trained.images, batch_of(folder, "train", normalization=colours))


def test_the_statistics_of_a_run_are_those_of_flags_that_repeat_them() -> None:
    run = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.3]}  # as resolved.toml gives them
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.3)
    assert statistics_of_weights("timm:volo_d1", "volo_d1", run, mean, std) == (mean, std)
    with pytest.raises(UserError, match="was trained with --mean"):
        statistics_of_weights("timm:volo_d1", "volo_d1", run, std, std)
