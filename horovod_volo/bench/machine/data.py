"""Training images per second of a rank's loader, against Pillow in one thread and against timm's loader.

Against Pillow CPU seconds are compared, not wall-clock time: the loader's threads may run on several cores,
and the CPU time of an image decides how many cores a GPU needs. Against timm's loader, with as many workers
and all augmentation, whole epochs are timed by the wall clock; their pixels are not compared here, as both
sides draw their own crops and colours, but by tests. Every block begins with nothing prefetched.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.bench.cli import BatchSize, DataDir, Flag, GeneratedImages, ImgSize, Pairs
from horovod_volo.bench.comparison import WrongResultError, alternate, default_device, wait_for
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.image_bytes import open_image
from horovod_volo.data.loader import TrainLoader
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_STD
from horovod_volo.models.timm_api import training_loader

SEED = EPOCH = 0
_CLASSES = 4
_LANDSCAPE, _PORTRAIT = (375, 500), (500, 375)  # height, width
_LANDSCAPE_FRACTION = 0.7
_QUALITY = 90  # about 110 KB, ImageNet's average
_ALLOWED_DIFFERENCE = 2 / 255  # mean over pixels: decoders and filters round differently


class TimedEpochs:
    """Reads epochs of a loader that receives every image, with a thread for each core of this process."""

    def __init__(self, catalog: Catalog, settings: Data, image_size: int) -> None:
        self.first_step = 0  # of an epoch
        self.wall: list[float] = []  # seconds per image of each epoch
        self.loader = TrainLoader(
            catalog,
            None,
            settings,
            image_size=image_size,
            seed=SEED,
            rank=0,
            size=1,
            accumulation=1,
            device=default_device(),
            threads=len(os.sched_getaffinity(0)),
        )

    def close(self) -> None:
        """End the loader's threads."""
        self.loader.close()

    def batches(self) -> Iterator[TrainBatch]:
        """Return the batches of an epoch."""
        return self.loader.batches(EPOCH, self.first_step)

    def read(self) -> float:
        """Read an epoch; return its CPU seconds per image, of all threads together."""
        began, cpu_before = perf_counter(), process_time()
        images = sum(len(batch.images) for batch in self.batches())
        wait_for(default_device())
        self.wall.append((perf_counter() - began) / images)
        return (process_time() - cpu_before) / images


def measure(
    *,
    data_dir: DataDir = "data/demo",
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    batches: Annotated[int, Flag("batches in a block")] = 30,
    pairs: Pairs = 7,
) -> Result:
    """Measure runs of so many batches against Pillow."""
    catalog = build_catalog(data_dir, "train", None)
    if batches * batch_size > len(catalog):
        raise UserError(
            f"{data_dir} has {len(catalog)} training images, fewer than {batches} batches of {batch_size}. "
            f"Use --batches {len(catalog) // batch_size} or less, or a smaller --batch-size."
        )
    settings = Data(batch_size=batch_size, train_interpolation="bicubic", aa="", color_jitter=0.0, reprob=0.0)
    threads = len(os.sched_getaffinity(0))
    with closing(TimedEpochs(catalog, settings, img_size)) as ours:
        ours.first_step = ours.loader.steps - batches
        first = next(ours.batches())
        _assert_same_images(first.images, pillow_batch(catalog, first.indices, settings, img_size))
        drawn = [batch.indices for batch in ours.batches()]

        def pillow_block() -> float:
            cpu_before = process_time()
            for indices in drawn:
                pillow_batch(catalog, indices, settings, img_size)
            return (process_time() - cpu_before) / (batches * batch_size)

        found = alternate(ours.read, pillow_block, pairs)
    figures = [
        Figure.of_rate("images a second", ours.wall),
        Figure.of_rate("images a second and thread", ours.wall, 1 / threads),
        Figure.of_rate("images a second of CPU", found.ours),
        Figure.of("less CPU than Pillow", found.ratios, "x"),
    ]
    where = f"decoded on the {default_device().type}, data threads: {threads}"
    return Result("data", f"training images at {img_size} px, {where}", figures)


def _assert_same_images(ours: torch.Tensor, pillow: NDArray[np.float32]) -> None:
    difference = np.abs(ours.cpu().numpy() - pillow).mean(axis=(0, 2, 3))  # (3,)
    mean = float((difference * IMAGENET_STD).mean())
    if not mean < _ALLOWED_DIFFERENCE:
        raise WrongResultError(
            f"The loader's images differ from Pillow's by {255 * mean:.2f} of 255 on average. "
            "Nothing was measured."
        )


def pillow_batch(
    catalog: Catalog, indices: NDArray[np.int64], settings: Data, image_size: int
) -> NDArray[np.float32]:
    """Read, crop, resize, flip and normalise images one by one, (batch, 3, side, side)."""
    images = [open_image(catalog.read(index).data) for index in indices]
    sizes = np.array([(image.height, image.width) for image in images])
    crops = draw_crops(SEED, EPOCH, indices, sizes, settings)
    pixels = []
    for image, (top, left, height, width), horizontal, vertical in zip(
        images,
        crops.stored(crops.boxes, sizes).tolist(),
        crops.flip_horizontal,
        crops.flip_vertical,
        strict=True,
    ):
        crop = image.convert("RGB").crop((left, top, left + width, top + height))
        crop = crop.resize((image_size, image_size), Image.Resampling.BICUBIC)
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if horizontal else crop
        pixels.append(np.asarray(crop.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if vertical else crop))
    colours = np.stack(pixels).astype(np.float32) / 255  # (batch, side, side, 3)
    normalised = (colours - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))


def measure_loader(
    *,
    images: GeneratedImages = 1024,
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    pairs: Pairs = 7,
) -> Result:
    """Measure epochs of the training images against timm's loader."""
    settings, threads = Data(batch_size=batch_size), len(os.sched_getaffinity(0))
    with generated_catalog(images, batch_size) as catalog:
        theirs = training_loader(
            catalog.source,
            input_size=(3, img_size, img_size),
            batch_size=batch_size,
            is_training=True,
            use_prefetcher=False,  # made for GPUs; without one, workers that normalise are faster
            auto_augment=settings.aa,
            interpolation=settings.train_interpolation,
            scale=settings.scale,
            ratio=settings.ratio,
            hflip=settings.hflip,
            re_prob=settings.reprob,
            re_mode=settings.remode,
            num_workers=threads,
            persistent_workers=True,
            pin_memory=False,
            device=torch.device("cpu"),
        )

        def their_epoch() -> float:
            began = perf_counter()
            read = sum(len(images) for images, _ in theirs)
            return (perf_counter() - began) / read

        with closing(TimedEpochs(catalog, settings, img_size)) as ours:

            def our_epoch() -> float:
                ours.read()
                return ours.wall[-1]

            our_epoch(), their_epoch()  # the first epoch starts threads and workers
            found = alternate(our_epoch, their_epoch, pairs)
    where = f"on the {default_device().type}, threads and workers: {threads}"
    return Result(
        "loader",
        f"augmented training images at {img_size} px {where}",
        [
            Figure.of_rate("images a second", found.ours),
            Figure.of_rate("timm's loader", found.peer),
            Figure.of("faster than timm's loader", found.ratios, "x"),
        ],
    )


@contextmanager
def generated_catalog(images: int, batch_size: int) -> Iterator[Catalog]:
    """List so many generated photographs."""
    if images < batch_size:
        raise UserError(f"{images} images are no batch of {batch_size}. Use --batch-size {images} or less.")
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images)
        yield build_catalog(folder, "train", folder=None)


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
