"""How much of a GPU the engine's step uses: images a second, and the share of what the GPU can compute.

The share counts the arithmetic of forward and backward as the network is written, three times that of a
forward; what is computed again or left out by stochastic depth changes nothing of it.
"""

from __future__ import annotations

from time import perf_counter

import torch

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.pairs import repeats_for, timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import checked_config, losses_of, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.loader import TrainBatch
from horovod_volo.engine.compiled import check_compiler, compile_blocks
from horovod_volo.engine.context import TrainContext

CLASSES = 1000
# As measured on one H200: a bf16 product of 8192 x 8192 matrices of random values. Its data sheet says 989.
PEAK_TFLOPS = 790.0
# A training pass of one image, GFLOP: three times the forward, whose operations are counted layer by layer.
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
_TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # of the largest loss
_MILLISECONDS, _PERCENT, _GIB = 1e3, 100.0, 2**30


def measure(
    *, model: str, img_size: int, batch_size: int, precision: str, drop_path: float, compile: bool, pairs: int
) -> Result:
    """Measure blocks of steps of one rank."""
    settings = {
        "model": model,
        "img_size": img_size,
        "batch_size": batch_size,
        "precision": precision,
        "drop_path": drop_path,
        "compile": compile,
        "token_label": True,
        "token_label_data": "random",
    }
    config = checked_config(settings)
    plain = losses_of(*_opened(config), _FIRST_STEPS) if compile else None
    context, batch = _opened(config)
    if compile:
        check_compiler()
        compile_blocks(context.state.model)
    began = perf_counter()
    found = losses_of(context, batch, _FIRST_STEPS)
    start_seconds = perf_counter() - began
    what = f"the losses of {_FIRST_STEPS} steps, with blocks compiled and without"
    assert_agree(what, found, found if plain is None else plain, _TOLERANCES[precision])
    seconds = _blocks(context, batch, pairs)
    context.close()
    form = " compiled" if compile else ""
    title = (
        f"training step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    )
    return Result(
        f"gpu {model} {img_size}{form}",
        title,
        [
            Figure.of("images a second", [batch_size / taken for taken in seconds], "images/s"),
            Figure.of("step", [_MILLISECONDS * taken for taken in seconds], "ms"),
            Figure(f"first {_FIRST_STEPS} steps", start_seconds, "s"),
            *_of_the_gpu(config, seconds, context.resources.device),
        ],
    )


def share_of_peak(model: str, img_size: int, images_per_second: float) -> float:
    """Return the percentage of the peak that so many images a second take."""
    return _PERCENT * images_per_second * TRAIN_GFLOP[model, img_size] / (1e3 * PEAK_TFLOPS)


def _of_the_gpu(config: Config, seconds: list[float], device: torch.device) -> list[Figure]:
    if device.type != "cuda":
        return []
    model, side, batch = config.model.model, config.model.img_size, config.data.batch_size
    figures = [Figure("most memory held", torch.cuda.max_memory_allocated(device) / _GIB, "GiB")]
    if (model, side) in TRAIN_GFLOP:
        shares = [share_of_peak(model, side, batch / taken) for taken in seconds]
        figures.append(Figure.of(f"share of {PEAK_TFLOPS:.0f} TFLOP/s", shares, "%"))
    return figures


def _opened(config: Config) -> tuple[TrainContext, TrainBatch]:
    context = synthetic_job(config, World.single(), CLASSES)
    return context, random_batch(config, CLASSES, context.resources.device, seed=0)


def _blocks(context: TrainContext, batch: TrainBatch, pairs: int) -> list[float]:
    step = step_of(context, batch)
    block = timed(step, repeats_for(step, context.resources.device), context.resources.device)
    return [block() for _ in range(pairs)]
