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


def compiled(*runs: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the programs of each run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_step.py"), *map(json.dumps, runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(programs: list[dict[str, Any]], names: set[str]) -> None:
    assert {program["name"] for program in programs} == names
    assert {program["capability"] for program in programs} == {80, 90, 100}
    for program in programs:
        assert program["registers"] <= MOST_REGISTERS, program
        assert program["spilled"] == 0, program


def test_of_all_networks() -> None:
    """With low and high rates of drop path, a single image, and sides whose windows end at the border."""
    runs = [
        {"model": "volo_d1", "drop_path": 0.1},
        {"model": "volo_d2", "drop_path": 0.75, "batch_size": 3},
        {"model": "volo_d3", "drop_path": 0.1, "batch_size": 1},
        {"model": "volo_d4", "drop_path": 0.1, "img_size": 80},
        {"model": "volo_d5", "drop_path": 0.75, "batch_size": 1},
        {"model": "lvvit_s", "drop_path": 0.1, "img_size": 80},
    ]
    *of_volo, of_lvvit = compiled(*runs)
    for programs in of_volo:
        check(programs, OF_OUTLOOK | OF_ALL)
    check(of_lvvit, OF_ALL)


def test_none_is_compiled_after_the_first_steps() -> None:
    (programs,) = compiled({"model": "volo_demo", "drop_path": 0.5, "batch_size": 4, "steps": 20})
    check(programs, OF_OUTLOOK | OF_ALL)
    assert max(program["first step"] for program in programs) <= 10
    assert len(programs) <= 3 * 14
