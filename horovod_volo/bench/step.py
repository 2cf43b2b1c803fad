"""Speed of the engine's training step on random images, and a GPU's utilisation; a table of its operators."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from horovod_volo.bench.comparison import WrongResultError, assert_agree, repeats_for, timed
from horovod_volo.bench.results import (
    BatchSize,
    Compile,
    DropPath,
    Figure,
    Flag,
    ImgSize,
    Kernels,
    ModelName,
    Pairs,
    Precision,
    Result,
)
from horovod_volo.bench.synthetic import CLASSES, SyntheticRun, bench_config
from horovod_volo.cluster.world import World
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.model_cost import PASSES, count_cost
from horovod_volo.models.compiled import check_compiler
from horovod_volo.monitor.meters import device_memory_gib, peak_flops
from horovod_volo.profiler.step_profiler import RangeRecorder

_FIRST_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}  # relative to the largest loss
_PROFILED_STEPS = 5


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.0,
    kernels: Kernels = "auto",
    compile: Compile = False,
    pairs: Pairs = 7,
) -> Result:
    """Measure a model's step. Collective: every rank calls this."""
    config = bench_config(
        model=model, img_size=img_size, batch_size=batch_size, precision=precision, drop_path=drop_path,
        kernels=kernels, compile=compile,
    )  # fmt: skip
    world = World.connect()
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
            what = f"the losses of {_FIRST_STEPS} steps, with blocks compiled and without"
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
            figures.append(Figure("most memory held", device_memory_gib(run.device)[1], "GiB"))
        if run.device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(), precision)):
            # Recomputation and drop path do not change what counts as one image's work, as in the run's log.
            flops = PASSES * batch_size * count_cost(config, Classification(), CLASSES).forward_flops
            figures.append(Figure.of("MFU", 100 * flops / (peak * np.asarray(seconds)), "%"))
        if not run.losses(1).isfinite():
            raise WrongResultError("The loss is not finite after the measured steps. Nothing is reported.")
    images = f"{world.size} x {batch_size} random images"
    title = f"training step, {img_size} px, {precision}, {images}, drop path {drop_path}"
    form = " compiled" if compile else " plain" if kernels == "plain" else ""
    return Result(f"step {model} {img_size}{form}", title, figures)


def measure_operators(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.1,
    compile: Compile = False,
    trace: Annotated[str, Flag("write a trace for Perfetto to this file")] = "",
) -> str:
    """Return a table of the operators of some steps and of the steps' phases, the longest first."""
    config = bench_config(
        model=model, img_size=img_size, batch_size=batch_size, precision=precision, drop_path=drop_path,
        compile=compile,
    )  # fmt: skip
    with closing(SyntheticRun(config)) as run:
        run.losses(_FIRST_STEPS)  # kernels are compiled; waits for the device
        run.context.progress.timer.on_phase = RangeRecorder(run.device).begin_phase
        on_gpu = run.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            run.losses(_PROFILED_STEPS)
    if trace:
        profiler.export_chrome_trace(trace)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=80)
    return table
