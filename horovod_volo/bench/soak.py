"""Whether a training stream's memory and open files stay as they are, epoch after epoch, start after start.

The stream is closed and opened again every few epochs. Damaged images may be among the data: going on
after them is part of what must not leak. A stream that grows is a wrong result, not a figure.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from horovod_volo.bench.agreement import WrongResultError
from horovod_volo.bench.memory import resident_bytes
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.stream_alone import stream_alone
from horovod_volo.config.schema import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.labels.source import open_labels

_EPOCHS_OF_A_STREAM = 3
# Parts of the time. By the first, caches are full and the allocator has its pools; still it keeps now more,
# now less of what is free, so that a middle of several samples is taken.
_SETTLED, _END = (0.2, 0.4), (0.8, 1.0)
_ALLOWED_GROWTH = 0.03  # of the memory, from then to the end
_LEAST_STREAMS = 3
_MIB = 2**20


class Sample(NamedTuple):
    """What the process held after a stream was closed."""

    share: float  # of the time
    memory: int  # resident bytes
    files: int  # open


def measure(
    *, data_dir: str, token_label_data: str, img_size: int, batch_size: int, threads: int, minutes: float
) -> Result:
    """Run for so many minutes."""
    threads = threads or len(os.sched_getaffinity(0))
    began = perf_counter()
    samples: list[Sample] = []
    images = epoch = 0
    while len(samples) < _LEAST_STREAMS or samples[-1].share < 1:
        images += _run(data_dir, token_label_data, Data(batch_size=batch_size), img_size, threads, epoch)
        epoch += _EPOCHS_OF_A_STREAM
        share = (perf_counter() - began) / (60 * minutes)
        samples.append(Sample(share, resident_bytes(), _open_files()))
    settled, end = _usual_memory(samples, *_SETTLED), _usual_memory(samples, *_END)
    files = (samples[1].files, samples[-1].files)
    if end > (1 + _ALLOWED_GROWTH) * settled or files[1] > files[0]:
        raise WrongResultError(
            f"Resident memory went from {settled / _MIB:.0f} to {end / _MIB:.0f} MiB and open files from "
            f"{files[0]} to {files[1]} in {epoch} epochs."
        )
    return Result(
        "soak",
        f"{minutes:g} minutes of training images at {img_size} px, a new stream every "
        f"{_EPOCHS_OF_A_STREAM} epochs",
        [
            Figure("epochs", epoch, ""),
            Figure("images", images, ""),
            Figure("resident memory, settled", settled / _MIB, "MiB"),
            Figure("resident memory, at the end", end / _MIB, "MiB"),
            Figure("open files, settled", files[0], ""),
            Figure("open files, at the end", files[1], ""),
        ],
    )


def _usual_memory(samples: Sequence[Sample], first: float, last: float) -> float:
    """Return the median of a part of the time."""
    whole = samples[-1].share
    chosen = [sample for sample in samples[1:] if first <= sample.share / whole <= last] or samples[1:]
    return median(sample.memory for sample in chosen)


def _run(
    data_dir: str, token_label_data: str, settings: Data, img_size: int, threads: int, first_epoch: int
) -> int:
    """Open a stream, go through some epochs, close it; return how many images it gave."""
    catalog = build_catalog(data_dir, "train", folder=None)
    labels = open_labels(token_label_data, catalog, None) if token_label_data else None
    stream = stream_alone(catalog, settings, image_size=img_size, threads=threads, labels=labels)
    images = 0
    for epoch in range(first_epoch, first_epoch + _EPOCHS_OF_A_STREAM):
        images += sum(len(batch.images) for batch in stream.batches(epoch, 0))
    stream.close()
    if labels is not None:
        labels.close()
    catalog.close()
    del catalog, labels, stream
    gc.collect()
    return images


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
