#!/usr/bin/env python3
"""Profile training steps of a model on a random batch.

    python tools/profile_step.py OUT --model volo_d1 --batch-size 256 --precision bf16 --drop-path 0.1

OUT/MODEL.txt has a table of operators, OUT/MODEL.json.gz a trace of each launch.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from horovod_volo.bench.synthetic import SyntheticRun, bench_config
from horovod_volo.models.compiled import compile_blocks

_FIRST_STEPS, _STEPS = 3, 5  # kernels are compiled in the first steps


def main() -> None:
    """Profile one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="volo_d1")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--drop-path", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.mkdir(parents=True, exist_ok=True)
    with closing(SyntheticRun(bench_config(**settings))) as run:
        if args.compile:
            compile_blocks(run.context.state.model)
        run.losses(_FIRST_STEPS)  # waits for the device
        on_gpu = run.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            run.losses(_STEPS)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    name = f"{args.model}_compiled" if args.compile else args.model
    table = profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=80)
    (args.out / f"{name}.txt").write_text(f"{_STEPS} steps with {settings}\n{table}\n", encoding="utf-8")
    profiler.export_chrome_trace(str(args.out / f"{name}.json.gz"))


if __name__ == "__main__":
    main()
