"""Images decoded on a device equal those of the CPU, except for the rounding of the JPEG decoder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import EvalBatch, TrainBatch
from horovod_volo.data.image_decoder import IMAGENET_STD
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.token_labels.source import open_labels

# Of 255 levels, averaged over all images. In training the decoder on the GPU repeats chroma rows and columns,
# and that on the CPU interpolates, a difference of 1.3 for such images. In evaluation both interpolate, and
# only rounding differs. The CPU is compared with itself.
LARGEST_MEAN_DIFFERENCE = {
    ("cpu", "train"): 0.0,
    ("cpu", "val"): 0.0,
    ("cuda", "train"): 2.0,
    ("cuda", "val"): 1.0,
}

# No operations, which would enlarge small differences; test_augmenting.py compares them.
SETTINGS = Data(batch_size=6, vflip=0.5, train_interpolation="bicubic", aa="", color_jitter=0.0, reprob=0.0)
CPU = torch.device("cpu")

SIZES: dict[str, Any] = {"image_size": 64, "rank": 0, "size": 1, "threads": 2}

BatchesOf = Callable[[Path, torch.device], list[TrainBatch] | list[EvalBatch]]


def train_batches(folder: Path, device: torch.device, settings: Data = SETTINGS) -> list[TrainBatch]:
    catalog = build_catalog(str(folder), "train", None)
    labels = open_labels(str(folder / "token_labels"), catalog, None)
    loader = TrainLoader(catalog, labels, settings, seed=3, accumulation=1, device=device, **SIZES)
    with closing(loader):
        return list(loader.batches(0, 0))


def eval_batches(folder: Path, device: torch.device) -> list[EvalBatch]:
    catalog = build_catalog(str(folder), "val", None)
    with closing(EvalLoader(catalog, SETTINGS, crop_pct=0.9, device=device, **SIZES)) as loader:
        return list(loader)


def classes_of(batch: TrainBatch | EvalBatch) -> Tensor:
    return batch.classes if isinstance(batch, EvalBatch) else batch.labels.classes


def mean_difference(images: Tensor, expected: Tensor) -> float:
    """Return the mean difference in levels of 255 of normalised images (batch, 3, height, width)."""
    by_channel = (images - expected).abs().mean(dim=(0, 2, 3))  # (3,)
    return float(255 * (by_channel * torch.tensor(IMAGENET_STD)).mean())


def whole_image_batches(folder: Path, device: torch.device) -> list[TrainBatch]:
    """Return batches in which torch resizes each image, as it does after operations on whole images."""
    return train_batches(folder, device, replace(SETTINGS, randaugment_on="image"))


@pytest.mark.parametrize(
    ("split", "batches_of"),
    [("train", train_batches), ("train", whole_image_batches), ("val", eval_batches)],
)
def test_images_equal_the_cpus(images: Path, device: torch.device, split: str, batches_of: BatchesOf) -> None:
    expected = batches_of(images, CPU)
    found = batches_of(images, device)
    for batch, other in zip(found, expected, strict=True):
        assert batch.images.device == classes_of(batch).device == device
        assert batch.indices.tolist() == other.indices.tolist()
        assert classes_of(batch).tolist() == classes_of(other).tolist()
    pixels = torch.cat([batch.images.cpu() for batch in found])
    expected_pixels = torch.cat([batch.images for batch in expected])
    assert mean_difference(pixels, expected_pixels) <= LARGEST_MEAN_DIFFERENCE[device.type, split]
    # The difference between two different images is far above the bound.
    assert mean_difference(pixels, expected_pixels.roll(1, dims=0)) > 10


def test_labels_are_copied_to_the_device_unchanged(images: Path, device: torch.device) -> None:
    for batch, other in zip(train_batches(images, device), train_batches(images, CPU), strict=True):
        for name in ("scores", "ids", "boxes"):
            found, expected = getattr(batch.labels.maps, name), getattr(other.labels.maps, name)
            assert found.device == device
            assert torch.equal(found.cpu(), expected)
