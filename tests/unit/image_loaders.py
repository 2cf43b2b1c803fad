"""Loaders of images on the CPU, for tests that compare what they load."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.token_labels.source import LabelSource

_COMMON: dict[str, Any] = {
    "image_size": 32,
    "rank": 0,
    "size": 1,
    "device": torch.device("cpu"),
    "threads": 2,
}


def train_loader(
    images: Catalog, settings: Data, labels: LabelSource | None = None, **changes: Any
) -> TrainLoader:
    """Return a loader of training batches."""
    return TrainLoader(images, labels, settings, **_COMMON | {"seed": 5, "accumulation": 1} | changes)


def eval_loader(images: Catalog, settings: Data, **changes: Any) -> EvalLoader:
    """Return a loader of evaluation batches."""
    return EvalLoader(images, settings, **_COMMON | {"crop_pct": 1.0} | changes)


def evaluated_images(images: Catalog, settings: Data, **changes: Any) -> Tensor:
    """Return all images as an evaluation has them, (images, 3, image_size, image_size)."""
    with closing(eval_loader(images, settings, **changes)) as loader:
        return torch.cat([batch.images.clone() for batch in loader])
