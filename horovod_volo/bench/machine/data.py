"""Training images per second of a rank's stream, against Pillow in one thread.

CPU seconds are compared, not wall-clock time: the stream's threads may run on several cores, and the CPU time
of an image decides how many cores a GPU needs. Every block is a run of its own, so that no batch is
prefetched during the other side's time.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from time import process_time
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.bench.cli import BatchSize, DataDir, Flag, ImgSize, Pairs, Threads
from horovod_volo.bench.comparison import WrongResultError, alternate, default_device
from horovod_volo.bench.machine.image_streams import (
    EPOCH,
    SEED,
    single_rank_stream,
    threads_or_all,
    time_epoch,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.loader import TrainLoader
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_STD

_ALLOWED_DIFFERENCE = 2 / 255  # mean over pixels: decoders and filters round differently

Peer = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # from indices of the catalog to images


def measure(
    *,
    data_dir: DataDir = "data/demo",
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    threads: Threads = 0,
    batches: Annotated[int, Flag("batches in a block")] = 30,
    pairs: Pairs = 7,
) -> Result:
    """Measure runs of so many batches."""
    catalog = build_catalog(data_dir, "train", None)
    if batches * batch_size > len(catalog):
        raise UserError(
            f"{data_dir} has {len(catalog)} training images, fewer than {batches} batches of {batch_size}. "
            f"Use --batches {len(catalog) // batch_size} or less, or a smaller --batch-size."
        )
    settings = Data(batch_size=batch_size, train_interpolation="bicubic", aa="", color_jitter=0.0, reprob=0.0)
    threads = threads_or_all(threads)
    stream = single_rank_stream(catalog, settings, image_size=img_size, threads=threads)
    try:
        peer = lambda indices: pillow_batch(catalog, indices, settings, image_size=img_size)  # noqa: E731
        figures = _compare(stream, peer, batches, threads, pairs)
    finally:
        stream.close()
    title = (
        f"training images at {img_size} px, decoded on the {default_device().type}, data threads: {threads}"
    )
    return Result("data", title, figures)


def _compare(stream: TrainLoader, peer: Peer, batches: int, threads: int, pairs: int) -> list[Figure]:
    first_step = stream.steps - batches
    _assert_same_images(next(stream.batches(EPOCH, first_step)), peer)
    indices = [batch.indices for batch in stream.batches(EPOCH, first_step)]
    wall: list[float] = []

    def our_block() -> float:
        seconds = time_epoch(stream, first_step)
        wall.append(seconds.wall)
        return seconds.cpu

    def peer_block() -> float:
        cpu_before = process_time()
        for batch in indices:
            peer(batch)
        return (process_time() - cpu_before) / sum(map(len, indices))

    found = alternate(our_block, peer_block, pairs)
    return [
        Figure.of_rate("images a second", wall),
        Figure.of_rate("images a second and thread", wall, 1 / threads),
        Figure.of_rate("images a second of CPU", found.ours),
        Figure.of_estimate("less CPU than Pillow", found.times_faster, "x"),
    ]


def _assert_same_images(batch: TrainBatch, peer: Peer) -> None:
    difference = np.abs(batch.images.cpu().numpy() - peer(batch.indices)).mean(axis=(0, 2, 3))  # (3,)
    mean = float((difference * IMAGENET_STD).mean())
    if not mean < _ALLOWED_DIFFERENCE:
        raise WrongResultError(
            f"The stream's images differ from Pillow's by {255 * mean:.2f} of 255 on average. "
            "Nothing was measured."
        )


def pillow_batch(
    catalog: Catalog, indices: NDArray[np.int64], settings: Data, *, image_size: int
) -> NDArray[np.float32]:
    """Read, crop, resize, flip and normalise images one by one, (batch, 3, side, side)."""
    images = [Image.open(io.BytesIO(catalog.read(index).data)) for index in indices]
    sizes = np.array([(image.height, image.width) for image in images])
    plan = draw_crops(SEED, EPOCH, indices, sizes, settings)
    pixels = []
    for image, (top, left, height, width), horizontal, vertical in zip(
        images, plan.stored_boxes(sizes).tolist(), plan.flip_horizontal, plan.flip_vertical, strict=True
    ):
        crop = image.convert("RGB").crop((left, top, left + width, top + height))
        crop = crop.resize((image_size, image_size), Image.Resampling.BICUBIC)
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if horizontal else crop
        pixels.append(np.asarray(crop.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if vertical else crop))
    colours = np.stack(pixels).astype(np.float32) / 255  # (batch, side, side, 3)
    normalised = (colours - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
