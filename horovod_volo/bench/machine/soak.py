"""Whether memory and open files grow while training streams are read and reopened.

The stream is closed and reopened every few epochs. The data may contain damaged images: recovery must not
leak either. Growth is a wrong result, not a figure.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

from horovod_volo.bench.cli import BatchSize, DataDir, Flag, ImgSize, Threads
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.machine.image_streams import single_rank_stream, threads_or_all
from horovod_volo.bench.memory import resident_bytes
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.labels.source import open_labels

_EPOCHS_OF_A_STREAM = 3
# Fractions of the time. By the first, caches are full and the allocator has its pools. What it keeps still
# varies, so the median of several samples is taken.
_SETTLED, _END = (0.2, 0.4), (0.8, 1.0)
_ALLOWED_GROWTH = 0.03  # of the memory, from the first to the last
_LEAST_STREAMS = 3
_MIB = 2**20


class Sample(NamedTuple):
    """State of the process after a stream was closed."""

    time: float  # fraction of the run
    memory: int  # resident bytes
    files: int  # open


def measure(
    *,
    data_dir: DataDir = "data/demo",
    token_label_data: Annotated[str, Flag("label maps of the images; empty: none", metavar="DIR")] = "",
    img_size: ImgSize = 64,
    batch_size: BatchSize = 32,
    threads: Threads = 0,
    minutes: Annotated[float, Flag("duration in minutes")] = 10.0,
) -> Result:
    """Run for so many minutes."""
    settings, threads = Data(batch_size=batch_size), threads_or_all(threads)
    began = perf_counter()
    samples: list[Sample] = []
    images = epoch = 0
    while len(samples) < _LEAST_STREAMS or samples[-1].time < 1:
        images += _run(data_dir, token_label_data, settings, img_size, threads, epoch)
        epoch += _EPOCHS_OF_A_STREAM
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        samples.append(Sample((perf_counter() - began) / (60 * minutes), resident_bytes(), open_files))
    settled, end = _median_memory(samples, *_SETTLED), _median_memory(samples, *_END)
    files = (samples[1].files, samples[-1].files)
    if end > (1 + _ALLOWED_GROWTH) * settled or files[1] > files[0]:
        raise WrongResultError(
            f"Resident memory went from {settled / _MIB:.0f} to {end / _MIB:.0f} MiB and open files from "
            f"{files[0]} to {files[1]} in {epoch} epochs."
        )
    title = f"{minutes:g} minutes of training images at {img_size} px, a new stream every "
    return Result(
        "soak",
        f"{title}{_EPOCHS_OF_A_STREAM} epochs",
        [
            Figure("epochs", epoch, ""),
            Figure("images", images, ""),
            Figure("resident memory, settled", settled / _MIB, "MiB"),
            Figure("resident memory, at the end", end / _MIB, "MiB"),
            Figure("open files, settled", files[0], ""),
            Figure("open files, at the end", files[1], ""),
        ],
    )


def _median_memory(samples: Sequence[Sample], first: float, last: float) -> float:
    """Return the median over a part of the time."""
    whole = samples[-1].time
    chosen = [sample for sample in samples[1:] if first <= sample.time / whole <= last] or samples[1:]
    return median(sample.memory for sample in chosen)


def _run(
    data_dir: str, token_label_data: str, settings: Data, img_size: int, threads: int, first_epoch: int
) -> int:
    """Open a stream, read some epochs, close it; return the number of images read."""
    catalog = build_catalog(data_dir, "train", folder=None)
    labels = open_labels(token_label_data, catalog, None) if token_label_data else None
    stream = single_rank_stream(catalog, settings, image_size=img_size, threads=threads, labels=labels)
    images = 0
    for epoch in range(first_epoch, first_epoch + _EPOCHS_OF_A_STREAM):
        images += sum(len(batch.images) for batch in stream.passes(epoch, 0))
    stream.close()
    if labels is not None:
        labels.close()
    catalog.close()
    del catalog, labels, stream
    gc.collect()
    return images
