"""Speed of the engine's training step on random images, and a GPU's utilisation."""

from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Annotated, Literal

import numpy as np
import torch

from horovod_volo.bench.comparison import WrongResultError, assert_agree, repeats_for, timed
from horovod_volo.bench.results import BatchSize, DropPath, Figure, Flag, ImgSize, ModelName, Pairs, Result
from horovod_volo.bench.synthetic import CLASSES, SyntheticRun, bench_config
from horovod_volo.cluster.world import World
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.model_cost import PASSES, count_cost
from horovod_volo.models.compiled import check_compiler
from horovod_volo.monitor.meters import device_memory_gib, peak_flops

_FIRST_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}  # relative to the largest loss


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], Flag("arithmetic of the step")] = "fp32",
    drop_path: DropPath = 0.0,
    kernels: Annotated[Literal["auto", "plain"], Flag("on a GPU: Triton's, or PyTorch's own")] = "auto",
    compile: Annotated[bool, Flag("compile the network's blocks")] = False,
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
        seconds = np.array([block() for _ in range(pairs)])
        figures = [
            Figure.of("images a second", batch_size * world.size / seconds, "images/s"),
            Figure.of("whole step", 1e3 * seconds, "ms"),
            Figure(f"first {_FIRST_STEPS} steps", first_seconds, "s"),
        ]
        if run.device.type == "cuda":
            figures.append(Figure("most memory held", device_memory_gib(run.device)[1], "GiB"))
        if run.device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(), precision)):
            # Recomputation and drop path do not change what counts as one image's work, as in the run's log.
            flops = PASSES * batch_size * count_cost(config, Classification(), CLASSES).forward_flops
            figures.append(Figure.of("MFU", 100 * flops / (peak * seconds), "%"))
        if not run.losses(1).isfinite():
            raise WrongResultError("The loss is not finite after the measured steps. Nothing is reported.")
    images = f"{world.size} x {batch_size} random images"
    title = f"training step, {img_size} px, {precision}, {images}, drop path {drop_path}"
    form = " compiled" if compile else " plain" if kernels == "plain" else ""
    return Result(f"step {model} {img_size}{form}", title, figures)
