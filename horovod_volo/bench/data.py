"""How many training images a second a rank's stream gives, beside Pillow's one thread.

Seconds of CPU are compared, not of the clock: the stream's threads may run on several cores, and
what an image costs is what decides how many cores a GPU needs. Every block is a run of its own, so
that no batch is made ready in the other's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter, process_time

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.agreement import WrongResultError
from horovod_volo.bench.pairs import alternate, wait_for
from horovod_volo.bench.peers_data import pillow_batch
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.stream_alone import SEED, device_here, stream_alone
from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainBatch, TrainLoader
from horovod_volo.data.pipeline import IMAGENET_STD

_EPOCH = 0
_ALLOWED_DIFFERENCE = 2 / 255  # of the range of colours, on average: decoders and filters round differently

Peer = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # from places in the catalog to images


def measure(
    *, data_dir: str, img_size: int, batch_size: int, threads: int, batches: int, pairs: int
) -> Result:
    """Measure runs of so many batches."""
    catalog = build_catalog(data_dir, "train", None)
    if batches * batch_size > len(catalog):
        raise UserError(
            f"{data_dir} has {len(catalog)} training images, fewer than {batches} batches of {batch_size}. "
            f"Use --batches {len(catalog) // batch_size} or less, or a smaller --batch-size."
        )
    settings = Data(batch_size=batch_size, train_interpolation="bicubic", aa="", color_jitter=0.0, reprob=0.0)
    threads = threads or len(os.sched_getaffinity(0))
    device = device_here()
    stream = stream_alone(catalog, settings, image_size=img_size, threads=threads)

    def peer(indices: NDArray[np.int64]) -> NDArray[np.float32]:
        return pillow_batch(catalog, indices, settings, image_size=img_size, seed=SEED, epoch=_EPOCH)

    try:
        figures = _compare(stream, peer, batches, threads, device, pairs)
    finally:
        stream.close()
    title = f"training images at {img_size} px, decoded on the {device.type}, data threads: {threads}"
    return Result("data", title, figures)


def _compare(
    stream: TrainLoader, peer: Peer, batches: int, threads: int, device: torch.device, pairs: int
) -> list[Figure]:
    first_step = stream.steps - batches
    _assert_same_images(next(stream.batches(_EPOCH, first_step)), peer)
    shares = [batch.indices for batch in stream.batches(_EPOCH, first_step)]
    images = sum(map(len, shares))
    rates: list[float] = []

    def our_block() -> float:
        began, cpu_before = perf_counter(), process_time()
        for _ in stream.batches(_EPOCH, first_step):
            pass
        wait_for(device)
        rates.append(images / (perf_counter() - began))
        return (process_time() - cpu_before) / images

    def peer_block() -> float:
        cpu_before = process_time()
        for indices in shares:
            peer(indices)
        return (process_time() - cpu_before) / images

    result = alternate(our_block, peer_block, pairs)
    return [
        Figure.of("images a second", rates, "images/s"),
        Figure.of("images a second and thread", [rate / threads for rate in rates], "images/s"),
        Figure.of("images a second of CPU", [1 / seconds for seconds in result.ours], "images/s"),
        Figure.of_estimate("less CPU than Pillow", result.times_faster, "x"),
    ]


def _assert_same_images(batch: TrainBatch, peer: Peer) -> None:
    difference = np.abs(batch.images.cpu().numpy() - peer(batch.indices)).mean(axis=(0, 2, 3))  # (3,)
    mean = float((difference * IMAGENET_STD).mean())
    if not mean < _ALLOWED_DIFFERENCE:
        raise WrongResultError(
            f"The stream's images differ from Pillow's by {255 * mean:.2f} of 255 on average. "
            "Nothing was measured."
        )
