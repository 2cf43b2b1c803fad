"""A training step for absent GPUs: its Triton programs compile, nothing makes the host wait."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
OF_OUTLOOK = {"softmax_sums", "aggregate_windows", "logits_backward"}
OF_ALL = {"statistics_tables", "apply_layer", "normalize_images"}
OF_ALL |= {"loss_kernel", "gradient_kernel", "table_kernel"}
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
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_step.py"), *map(json.dumps, RUNS)]
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


NETWORKS = ("volo_d1", "volo_d5", "lvvit_s", "resnet18")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that stands for PyTorch's CUDA part."""
    built, installed = tmp_path_factory.mktemp("cuda") / "cuda_without_gpu.so", Path(torch.__file__).parent
    source = HERE / "cuda_without_gpu.cpp"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{installed / 'include'}", str(source)]
    libraries = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(built)]
    subprocess.run([*command, *libraries], check=True)
    return built


def outcomes(library: Path, *runs: dict[str, Any]) -> list[str]:
    """Take one step in each run; return "took a step", or the error."""
    command = [sys.executable, "-m", "tests.gpu.step_without_gpu", str(library), *map(json.dumps, runs)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_nothing_in_a_step_makes_the_host_wait_or_breaks_the_graph_of_a_block(library: Path) -> None:
    drop_path = {"volo_d1": 0.1, "volo_d5": 0.75}
    runs = [{"model": model, "drop_path": drop_path.get(model, 0.0)} for model in NETWORKS]
    runs += [run | {"compiled": True} for run in runs]
    of_volo = {"model": "volo_d1", "drop_path": 0.1, "ranks": 2}
    runs += [
        of_volo,
        of_volo | {"shard_optimizer": True},
        of_volo | {"accumulation": 2, "token_label": False},
    ]
    # Of these the host reads a value, in a block.
    planted = {"model": "volo_d1", "planted": True}
    found = outcomes(library, *runs, planted, planted | {"compiled": True})
    assert found[:-2] == ["took a step"] * len(runs)
    assert found[-2] == "RuntimeError: aten._local_scalar_dense.default would synchronise with the device"
    assert found[-1].startswith("Unsupported: "), found[-1]
