"""How fast images come with all the published augmentation, beside timm's loader of as many workers.

Whole epochs are timed by the clock, ours and timm's in turns; each begins with nothing made ready.
That the pixels are right is the tests' concern: both draw their own crops and colours.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from horovod_volo.bench.pairs import alternate, wait_for
from horovod_volo.bench.photographs import write_photographs
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.stream_alone import device_here, stream_alone
from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.models.timm_api import training_loader

_EPOCH = 0


def measure(
    *, data_dir: str, images: int, img_size: int, batch_size: int, threads: int, pairs: int
) -> Result:
    """Measure epochs of the training images below `data_dir`, or else of so many made for this."""
    if data_dir:
        return _measure(data_dir, img_size, batch_size, threads, pairs)
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images)
        return _measure(folder, img_size, batch_size, threads, pairs)


def _measure(data_dir: str, img_size: int, batch_size: int, threads: int, pairs: int) -> Result:
    catalog = build_catalog(data_dir, "train", folder=None)
    if len(catalog) < batch_size:
        raise UserError(
            f"{data_dir} has {len(catalog)} training images. Use --batch-size {len(catalog)} or less."
        )
    settings = Data(batch_size=batch_size)
    threads = threads or len(os.sched_getaffinity(0))
    device = device_here()
    theirs = _timm_loader(catalog.source, settings, image_size=img_size, workers=threads)
    stream = stream_alone(catalog, settings, image_size=img_size, threads=threads)

    def our_epoch() -> float:
        began = perf_counter()
        images = sum(len(batch.images) for batch in stream.batches(_EPOCH, 0))
        wait_for(device)
        return (perf_counter() - began) / images

    def their_epoch() -> float:
        began = perf_counter()
        images = sum(len(images) for images, _ in theirs)
        return (perf_counter() - began) / images

    try:
        our_epoch(), their_epoch()  # the first of each starts threads and workers
        result = alternate(our_epoch, their_epoch, pairs)
    finally:
        stream.close()
    title = f"augmented training images at {img_size} px on the {device.type}, threads and workers: {threads}"
    return Result(
        "loader",
        title,
        [
            Figure.of("images a second", [1 / seconds for seconds in result.ours], "images/s"),
            Figure.of("timm's loader", [1 / seconds for seconds in result.peer], "images/s"),
            Figure.of_estimate("faster than timm's loader", result.times_faster, "x"),
        ],
    )


def _timm_loader(folder: str, settings: Data, *, image_size: int, workers: int) -> Iterable[Any]:
    loader: Iterable[Any] = training_loader(
        folder,
        input_size=(3, image_size, image_size),
        batch_size=settings.batch_size,
        is_training=True,
        use_prefetcher=False,  # it is for GPUs; without one, workers that normalise are faster
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
