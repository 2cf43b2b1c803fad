"""A training stream as benchmarks measure it: of one rank, on the device that is here."""

from __future__ import annotations

import torch

from horovod_volo.config.schema import Data
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.source import LabelSource
from horovod_volo.data.loader import TrainLoader

SEED = 0


def device_here() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def stream_alone(
    catalog: Catalog, settings: Data, *, image_size: int, threads: int, labels: LabelSource | None = None
) -> TrainLoader:
    """Open a stream that is given every image."""
    return TrainLoader(
        catalog,
        labels,
        settings,
        image_size=image_size,
        seed=SEED,
        rank=0,
        size=1,
        accumulation=1,
        device=device_here(),
        threads=threads,
    )
