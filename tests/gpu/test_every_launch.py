"""Every Triton program that a training step launches compiles for three generations of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
OF_OUTLOOK = {"softmax_sums", "aggregate_windows", "logits_backward"}
OF_ALL = {
    *("statistics_tables", "apply_layer", "normalize_images"),
    *("loss_kernel", "gradient_kernel", "table_kernel"),
}
# So that a multiprocessor can run three programs of 128 threads; without spilling.
MOST_REGISTERS = 168


# With low and high rates of drop path, a single image, and sides whose windows end at the border.
RUNS: list[dict[str, Any]] = [
    {"model": "volo_d1", "drop_path": 0.1},
    {"model": "volo_d2", "drop_path": 0.75, "batch_size": 3},
    {"model": "volo_d3", "drop_path": 0.1, "batch_size": 1},
    {"model": "volo_d4", "drop_path": 0.1, "img_size": 80},
    {"model": "volo_d5", "drop_path": 0.75, "batch_size": 1},
    {"model": "lvvit_s", "drop_path": 0.1, "img_size": 80},
    {"model": "volo_demo", "drop_path": 0.5, "batch_size": 4, "steps": 20},
]


def test_every_program_compiles_and_none_after_the_first_steps() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_step.py"), *map(json.dumps, RUNS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    for run, programs in zip(RUNS, map(json.loads, done.stdout.splitlines()), strict=True):
        expected = OF_ALL if run["model"] == "lvvit_s" else OF_ALL | OF_OUTLOOK
        assert {program["name"] for program in programs} == expected
        assert {program["capability"] for program in programs} == {80, 90, 100}
        for program in programs:
            assert program["registers"] <= MOST_REGISTERS, program
            assert program["spilled"] == 0, program
    assert max(program["first step"] for program in programs) <= 10  # of the longest run, the last
    assert len(programs) <= 3 * 14
