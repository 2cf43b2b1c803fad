"""The operators of training steps on a random batch, the longest first, and a trace of each launch."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from torch.profiler import ProfilerActivity, profile

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, ModelName, Precision
from horovod_volo.bench.synthetic import SyntheticRun, bench_config

_FIRST_STEPS, _STEPS = 3, 5  # kernels are compiled in the first steps


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.1,
    compile: Annotated[bool, Flag("compile the network's blocks")] = False,
    trace: Annotated[str, Flag("write a trace for Perfetto to this file")] = "",
) -> str:
    """Return a table of the operators."""
    config = bench_config(
        model=model, img_size=img_size, batch_size=batch_size, precision=precision, drop_path=drop_path,
        compile=compile,
    )  # fmt: skip
    with closing(SyntheticRun(config)) as run:
        run.losses(_FIRST_STEPS)  # waits for the device
        on_gpu = run.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            run.losses(_STEPS)
    if trace:
        profiler.export_chrome_trace(trace)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=80)
    return table
