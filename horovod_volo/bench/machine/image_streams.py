"""Training images for benchmarks: generated photographs, a training stream of one rank, and a timed epoch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.bench.comparison import default_device, wait_for
from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.labels.source import LabelSource
from horovod_volo.data.loader import TrainLoader

SEED = EPOCH = 0
_CLASSES = 4
_LANDSCAPE, _PORTRAIT = (375, 500), (500, 375)  # height, width
_LANDSCAPE_FRACTION = 0.7
_QUALITY = 90  # about 110 KB, ImageNet's average


class EpochTime(NamedTuple):
    """Seconds per image of one epoch."""

    wall: float
    cpu: float  # of this process, all threads together


def single_rank_stream(
    catalog: Catalog, settings: Data, *, image_size: int, threads: int, labels: LabelSource | None = None
) -> TrainLoader:
    """Open a stream that receives every image."""
    return TrainLoader(
        catalog,
        labels,
        settings,
        image_size=image_size,
        seed=SEED,
        rank=0,
        size=1,
        accumulation=1,
        device=default_device(),
        threads=threads,
    )


def time_epoch(stream: TrainLoader, first_step: int = 0) -> EpochTime:
    """Read an epoch from a step on."""
    began, cpu_before = perf_counter(), process_time()
    images = sum(len(batch.images) for batch in stream.batches(EPOCH, first_step))
    wait_for(default_device())
    return EpochTime((perf_counter() - began) / images, (process_time() - cpu_before) / images)


def threads_or_all(threads: int) -> int:
    """Return the number of threads, or of this process's cores where it is 0."""
    return threads or len(os.sched_getaffinity(0))


@contextmanager
def training_catalog(data_dir: str, images: int, batch_size: int) -> Iterator[Catalog]:
    """List the training images below a folder, or, if it is empty, that many generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        if not data_dir:
            write_photographs(Path(folder), images)
        catalog = build_catalog(data_dir or folder, "train", folder=None)
        if len(catalog) < batch_size:
            raise UserError(
                f"{data_dir or folder} has {len(catalog)} training images. "
                f"Use --batch-size {len(catalog)} or less."
            )
        yield catalog


def write_photographs(folder: Path, images: int) -> None:
    """Write training images with the size and decoding cost of ImageNet's photographs, always the same."""
    source = np.random.default_rng(0)
    for number in range(images):
        size = _LANDSCAPE if source.random() < _LANDSCAPE_FRACTION else _PORTRAIT
        path = folder / "train" / f"c{number % _CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_photograph(source, *size)).save(path, quality=_QUALITY)


def _photograph(source: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Draw noise with a 1/f amplitude spectrum, as photographs have; the channels are highly correlated."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1

    def noise(exponent: float) -> NDArray[np.float64]:
        spectrum = source.normal(size=frequency.shape) + 1j * source.normal(size=frequency.shape)
        drawn = np.fft.irfft2(spectrum / frequency**exponent, s=(height, width))
        return np.asarray(drawn / drawn.std())

    light = noise(1.0)
    channels = [118 + source.normal(0, 15) + 45 * (light + 0.5 * noise(1.2)) for _ in range(3)]
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)
