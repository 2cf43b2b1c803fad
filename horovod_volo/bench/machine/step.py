"""Speed of the engine's training step on random images, the time of its parts, and a GPU's utilisation.

Whole steps run unchanged. The parts are timed in a separate run, which waits for the device at the end of
each part and therefore takes slightly longer in total.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, Kernels, ModelName, Pairs, Precision
from horovod_volo.bench.comparison import (
    Samples,
    WrongResultError,
    assert_agree,
    repeats_for,
    timed,
    wait_for,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, forward_flops
from horovod_volo.cluster.world import World
from horovod_volo.models.compiled import check_compiler

T = TypeVar("T")

# Measured on one H200: bf16 product of 8192 x 8192 matrices of random values. The data sheet says 989.
PEAK_TFLOPS = 790.0
OF_PEAK = f"fraction of {PEAK_TFLOPS:.0f} TFLOP/s"
_FIRST_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}  # relative to the largest loss
_SPLIT_STEPS = 9


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.0,
    kernels: Kernels = "auto",
    compile: Annotated[bool, Flag("compile the network's blocks")] = False,
    pairs: Pairs = 7,
) -> Result:
    """Measure a model's step. Collective: every rank calls this."""
    config = bench_config(
        model=model,
        img_size=img_size,
        batch_size=batch_size,
        precision=precision,
        drop_path=drop_path,
        kernels=kernels,
        compile=compile,
    )
    world = World.connect()
    what = f"the losses of {_FIRST_STEPS} steps, with blocks compiled and without"
    if compile:
        check_compiler()
        uncompiled = replace(config, model=replace(config.model, compile=False))
        with closing(SyntheticRun(uncompiled, world)) as run:
            eager = run.losses(_FIRST_STEPS)
    with closing(SyntheticRun(config, world)) as run:
        began = perf_counter()
        losses = run.losses(_FIRST_STEPS)
        first_seconds = perf_counter() - began
        if compile:
            assert_agree(what, losses, eager, _TOLERANCES[precision])
        # A step is a collective, so all ranks take the number of repeats from rank 0.
        repeats = world.broadcast_object(repeats_for(timed(run.step, 1, run.device)))
        block = timed(run.step, repeats, run.device)
        seconds = [block() for _ in range(pairs)]
        figures = [
            Figure.of_rate("images a second", seconds, batch_size * world.size),
            Figure.of_seconds("whole step", seconds),
            Figure(f"first {_FIRST_STEPS} steps", first_seconds, "s"),
        ]
        if run.device.type == "cuda":
            held = torch.cuda.max_memory_allocated() / 2**30
            percentages = percent_of_peak(model, img_size, batch_size / np.asarray(seconds))
            figures += [Figure("most memory held", held, "GiB"), Figure.of(OF_PEAK, percentages, "%")]
        figures += [Figure.of_seconds(*part) for part in _seconds_of_parts(run).items()]
        if not run.losses(1).isfinite():
            raise WrongResultError("The loss is not finite after the measured steps. Nothing is reported.")
    images = f"{world.size} x {batch_size} random images"
    title = f"training step, {img_size} px, {precision}, {images}, drop path {drop_path}"
    form = " compiled" if compile else " plain" if kernels == "plain" else ""
    return Result(f"step {model} {img_size}{form}", title, figures)


def percent_of_peak(model: str, img_size: int, images_per_second: Samples) -> NDArray[np.float64]:
    """Return the percentage of the peak FLOP/s that a rank's speed amounts to (model FLOPs utilisation)."""
    # Forward and backward are three times the forward. Recomputation and drop path do not change it.
    flops = 3 * forward_flops(model, img_size)
    return 100 * np.asarray(images_per_second) * flops / (1e12 * PEAK_TFLOPS)


def _seconds_of_parts(run: SyntheticRun) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, step by step. Afterwards the run keeps noting times."""
    seconds: dict[str, list[float]] = {}
    ends: list[float] = []

    def noting_end(part: str, function: Callable[..., T]) -> Callable[..., T]:
        def noted(*values: Any) -> T:
            result = function(*values)
            wait_for(run.device)
            ends.append(perf_counter())
            seconds.setdefault(part, []).append(ends[-1] - ends[-2])
            return result

        return noted

    # The engine's step calls these at the end of its parts; in fp16 unscaling counts as exchange.
    context = run.context
    learner = context.learner
    learner.loss = noting_end("forward and loss", learner.loss)  # type: ignore[method-assign]
    context.progress.meter.add = noting_end("backward", context.progress.meter.add)  # type: ignore[method-assign]
    context.clip = noting_end("exchange wait", context.clip)
    step = noting_end("update", run.step)
    wait_for(run.device)
    ends.append(perf_counter())
    for _ in range(_SPLIT_STEPS):
        step()
    return seconds
