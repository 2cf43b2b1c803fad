"""Training images per second with all augmentation, against timm's loader with as many workers.

Whole epochs are timed by the wall clock, ours and timm's alternating; each begins with nothing prefetched.
The pixels are not compared here, as both sides draw their own crops and colours; tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch

from horovod_volo.bench.cli import BatchSize, GeneratedImages, ImgSize, OptionalDataDir, Pairs, Threads
from horovod_volo.bench.comparison import alternate, default_device
from horovod_volo.bench.machine.image_streams import (
    single_rank_stream,
    threads_or_all,
    time_epoch,
    training_catalog,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.models.timm_api import training_loader


def measure(
    *,
    data_dir: OptionalDataDir = "",
    images: GeneratedImages = 1024,
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    threads: Threads = 0,
    pairs: Pairs = 7,
) -> Result:
    """Measure epochs of the training images."""
    threads, settings = threads_or_all(threads), Data(batch_size=batch_size)
    with training_catalog(data_dir, images, batch_size) as catalog:
        theirs = _timm_loader(catalog.source, settings, image_size=img_size, workers=threads)
        stream = single_rank_stream(catalog, settings, image_size=img_size, threads=threads)

        def their_epoch() -> float:
            began = perf_counter()
            images = sum(len(images) for images, _ in theirs)
            return (perf_counter() - began) / images

        try:
            time_epoch(stream), their_epoch()  # the first epoch starts threads and workers
            found = alternate(lambda: time_epoch(stream).wall, their_epoch, pairs)
        finally:
            stream.close()
    where = f"on the {default_device().type}, threads and workers: {threads}"
    return Result(
        "loader",
        f"augmented training images at {img_size} px {where}",
        [
            Figure.of_rate("images a second", found.ours),
            Figure.of_rate("timm's loader", found.peer),
            Figure.of_estimate("faster than timm's loader", found.times_faster, "x"),
        ],
    )


def _timm_loader(folder: str, settings: Data, *, image_size: int, workers: int) -> Iterable[Any]:
    loader: Iterable[Any] = training_loader(
        folder,
        input_size=(3, image_size, image_size),
        batch_size=settings.batch_size,
        is_training=True,
        use_prefetcher=False,  # made for GPUs; without one, workers that normalise are faster
        auto_augment=settings.aa,
        interpolation=settings.train_interpolation,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        re_prob=settings.reprob,
        re_mode=settings.remode,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=False,
        device=torch.device("cpu"),
    )
    return loader
