"""Images whose colours encode the position of each pixel or are smooth, in folders, and loaders on a CPU."""

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.image_decoder import IMAGENET_MEAN, IMAGENET_STD
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.token_labels.source import LabelSource

# Crop, resize and flip only: without color operations, geometric operations and random erasing.
PLAIN: dict[str, Any] = {"train_interpolation": "bicubic", "aa": "", "color_jitter": 0.0, "reprob": 0.0}


def position_coded(width: int, height: int) -> Image.Image:
    """Return an image whose red encodes the column and green the row, as fractions of the side."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.rint(255 * (np.arange(width) + 0.5) / width)
    pixels[..., 1] = np.rint(255 * (np.arange(height) + 0.5) / height)[:, None]
    return Image.fromarray(pixels)


def smooth(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of a few random colours with smooth transitions."""
    colours = np.random.default_rng(seed).integers(0, 256, size=(5, 7, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def noisy(width: int, height: int, seed: int) -> Image.Image:
    """Return an image with as much detail as a photograph."""
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    pixels = np.asarray(smooth(width, height, seed)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def write_images(folder: Path, images: dict[str, Image.Image], **options: Any) -> Path:
    """Save each image under its "SPLIT/CLASS/FILE" name and return the folder."""
    for name, image in images.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file, **options)
    return folder


def contents(catalog: Catalog) -> list[tuple[str, str, bytes]]:
    """Return the name, the class and the encoded image of each sample."""
    classes = [catalog.classes[target] for target in catalog.targets]
    return [(catalog.name(index), name, catalog.read(index).tobytes()) for index, name in enumerate(classes)]


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of each file, by its path in the folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def only_batch(
    catalog: Catalog, labels: LabelSource | None, settings: Data, *, side: int, seed: int, epoch: int = 0
) -> TrainBatch:
    with closing(train_loader(catalog, settings, labels, image_size=side, seed=seed)) as loader:
        (batch,) = loader.batches(epoch, 0)
    return batch


def unnormalised(images: torch.Tensor) -> NDArray[np.float64]:
    """Return normalised images (batch, 3, height, width) as colours from 0 to 255."""
    mean = np.array(IMAGENET_MEAN)[:, None, None]
    std = np.array(IMAGENET_STD)[:, None, None]
    return 255 * (images.numpy().astype(np.float64) * std + mean)


_ALONE: dict[str, Any] = {"image_size": 32, "rank": 0, "size": 1, "device": torch.device("cpu"), "threads": 2}


def train_loader(
    images: Catalog, settings: Data, labels: LabelSource | None = None, **changes: Any
) -> TrainLoader:
    return TrainLoader(images, labels, settings, **_ALONE | {"seed": 5, "accumulation": 1} | changes)


def eval_loader(images: Catalog, settings: Data, **changes: Any) -> EvalLoader:
    return EvalLoader(images, settings, **_ALONE | {"crop_pct": 1.0} | changes)


def evaluated_images(images: Catalog, settings: Data, **changes: Any) -> Tensor:
    """Return all images as an evaluation has them, (images, 3, image_size, image_size)."""
    with closing(eval_loader(images, settings, **changes)) as loader:
        return torch.cat([batch.images.clone() for batch in loader])
