"""The training data of a rank: augmented images a second against timm's loader.

Whole epochs of images are timed by the wall clock, and begin with nothing prefetched. Their pixels are not
compared here, as both sides draw their own crops and colours, but by tests.
"""

import os
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.bench.comparison import alternate, default_device, wait_for
from horovod_volo.bench.peers import training_loader
from horovod_volo.bench.results import BatchSize, Figure, Flag, ImgSize, Pairs, Result
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainLoader

_CLASSES = 4
_LANDSCAPE, _PORTRAIT = (375, 500), (500, 375)  # height, width
_LANDSCAPE_FRACTION = 0.7
_QUALITY = 90  # about 110 KB, ImageNet's average


def measure(
    *,
    images: Annotated[int, Flag("images to generate, about 500 x 375 pixels")] = 1024,
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    pairs: Pairs = 7,
) -> Result:
    """Measure epochs of generated images, of which each rank reads all."""
    if images < batch_size:
        raise UserError(f"{images} images are no batch of {batch_size}. Use --batch-size {images} or less.")
    settings, device = Data(batch_size=batch_size), default_device()
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images)
        theirs = training_loader(folder, settings, img_size, threads)
        loader = TrainLoader(
            build_catalog(folder, "train", folder=None), None, settings, image_size=img_size, seed=0, rank=0,
            size=1, accumulation=1, device=device, threads=threads,
        )  # fmt: skip

        def our_epoch() -> float:
            began = perf_counter()
            read = sum(len(batch.images) for batch in loader.batches(0, 0))
            wait_for(device)
            return (perf_counter() - began) / read

        def their_epoch() -> float:
            began = perf_counter()
            read = sum(len(images) for images, _ in theirs)
            return (perf_counter() - began) / read

        with closing(loader):
            our_epoch(), their_epoch()  # the first epoch starts threads and workers
            found = alternate(our_epoch, their_epoch, pairs)
    return Result(
        "loader",
        f"augmented training images at {img_size} px on the {device.type}, threads and workers: {threads}",
        [
            Figure.of("images a second", 1 / found.ours, "images/s"),
            Figure.of("timm's loader", 1 / found.peer, "images/s"),
            Figure.of("faster than timm's loader", found.ratios, "x"),
        ],
    )


def write_photographs(folder: Path, images: int) -> None:
    """Write training images with the size and decoding cost of ImageNet's photographs, always the same."""
    random = np.random.default_rng(0)
    for number in range(images):
        size = _LANDSCAPE if random.random() < _LANDSCAPE_FRACTION else _PORTRAIT
        path = folder / "train" / f"c{number % _CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_photograph(random, *size)).save(path, quality=_QUALITY)


def _photograph(random: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Draw noise with a 1/f amplitude spectrum, as photographs have; the channels are highly correlated."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1

    def noise(exponent: float) -> NDArray[np.float64]:
        spectrum = random.normal(size=frequency.shape) + 1j * random.normal(size=frequency.shape)
        drawn = np.fft.irfft2(spectrum / frequency**exponent, s=(height, width))
        return np.asarray(drawn / drawn.std())

    light = noise(1.0)
    channels = [118 + random.normal(0, 15) + 45 * (light + 0.5 * noise(1.2)) for _ in range(3)]
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)
