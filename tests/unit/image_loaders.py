"""Loaders of images on the CPU, for tests that compare what they load."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.image_list import ImageList
from horovod_volo.data.loader import EvalLoader, TrainLoader

_COMMON: dict[str, Any] = {
    "image_size": 32,
    "rank": 0,
    "size": 1,
    "device": torch.device("cpu"),
    "threads": 2,
}


def train_loader(images: ImageList, settings: Data, **changes: Any) -> TrainLoader:
    """Return a loader of training batches without label maps."""
    return TrainLoader(images, None, settings, **_COMMON | {"seed": 5, "accumulation": 1} | changes)


def evaluated_images(images: ImageList, settings: Data, **changes: Any) -> Tensor:
    """Return all images as an evaluation has them, (images, 3, image_size, image_size)."""
    with closing(EvalLoader(images, settings, **_COMMON | {"crop_pct": 1.0} | changes)) as loader:
        return torch.cat([batch.images.clone() for batch in loader])
