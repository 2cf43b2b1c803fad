"""Speed of one rank's training step, and the model FLOPs utilisation of the GPU.

The FLOPs are those of forward and backward as the network is written, three times the forward's;
recomputation and drop path do not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Annotated

import torch

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, Model, Pairs, Precision
from horovod_volo.bench.comparison import assert_agree, block_of
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import (
    RANDOM_LABELS,
    checked_config,
    losses_of,
    random_batch,
    step_of,
    synthetic_job,
)
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.stream import Batch
from horovod_volo.engine.compiled import check_compiler, compile_blocks
from horovod_volo.engine.job import Job

CLASSES = 1000
# Measured on one H200: bf16 product of 8192 x 8192 matrices of random values. The data sheet says 989.
PEAK_TFLOPS = 790.0
# Forward and backward of one image: three times the forward, whose operations are counted layer by layer.
TRAIN_GFLOP = {
    ("volo_d1", 224): 41.5,
    ("volo_d2", 224): 85.8,
    ("volo_d3", 224): 124.4,
    ("volo_d4", 224): 265.6,
    ("volo_d5", 224): 433.8,
    ("volo_d5", 448): 1888.0,
    ("volo_d5", 512): 2547.0,
}
_FIRST_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # relative to the largest loss


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.1,
    compile: Annotated[bool, Flag("compile the network's blocks")] = False,
    pairs: Pairs = 7,
) -> Result:
    """Measure blocks of steps of one rank."""
    settings = {
        "model": model,
        "img_size": img_size,
        "batch_size": batch_size,
        "precision": precision,
        "drop_path": drop_path,
        "compile": compile,
    }
    config = checked_config(settings | RANDOM_LABELS)
    eager = losses_of(*_job_and_batch(config), _FIRST_STEPS) if compile else None
    job, batch = _job_and_batch(config)
    if compile:
        check_compiler()
        compile_blocks(job.state.model)
    began = perf_counter()
    losses = losses_of(job, batch, _FIRST_STEPS)
    start_seconds = perf_counter() - began
    what = f"the losses of {_FIRST_STEPS} steps, with blocks compiled and without"
    # Compared with themselves where nothing is compiled: losses that are not finite are still refused.
    assert_agree(what, losses, losses if eager is None else eager, _TOLERANCES[precision])
    block = block_of(step_of(job, batch), job.share.device)
    seconds = [block() for _ in range(pairs)]
    job.close()
    figures = [
        Figure.of_rate("images a second", seconds, batch_size),
        Figure.of_seconds("step", seconds),
        Figure(f"first {_FIRST_STEPS} steps", start_seconds, "s"),
        *_gpu_figures(model, img_size, [batch_size / value for value in seconds], job.share.device),
    ]
    title = (
        f"training step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    )
    return Result(f"gpu {model} {img_size}{' compiled' if compile else ''}", title, figures)


def share_of_peak(model: str, img_size: int, images_per_second: float) -> float:
    """Return the percentage of the peak FLOP/s that a speed amounts to."""
    return 100 * images_per_second * TRAIN_GFLOP[model, img_size] / (1e3 * PEAK_TFLOPS)


def _gpu_figures(model: str, img_size: int, rates: Sequence[float], device: torch.device) -> list[Figure]:
    if device.type != "cuda":
        return []
    figures = [Figure("most memory held", torch.cuda.max_memory_allocated(device) / 2**30, "GiB")]
    if (model, img_size) in TRAIN_GFLOP:
        shares = [share_of_peak(model, img_size, rate) for rate in rates]
        figures.append(Figure.of(f"share of {PEAK_TFLOPS:.0f} TFLOP/s", shares, "%"))
    return figures


def _job_and_batch(config: Config) -> tuple[Job, Batch]:
    job = synthetic_job(config, World.alone(), CLASSES)
    return job, random_batch(config, CLASSES, job.share.device, seed=0)
