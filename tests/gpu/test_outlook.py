"""The fused outlook attention, on a GPU or in Triton's interpreter, against the reference implementation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_outlook
import torch
from run_outlook import Case, Result, run

from horovod_volo.models.outlook import plain_outlook

pytest.importorskip("triton")

SCALE = 0.7
# batch, height, width, heads, head_dim: first more cells than one program computes, then odd and small sizes
CASES = [
    (torch.float32, 1e-5, (2, 9, 8, 1, 6)),
    (torch.bfloat16, 1e-2, (1, 3, 4, 2, 4)),
    (torch.float16, 1e-3, (2, 1, 1, 1, 8)),
]


def case(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Case:
    batch, height, width, heads, depth = shape
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(batch, height, width, heads * depth, generator=draw)
    scores = torch.randn(batch, -(-height // 2), -(-width // 2), heads * 81, generator=draw)
    grad_output = torch.randn(values.shape, generator=draw)
    return *(tensor.to(device, dtype) for tensor in (values, scores, grad_output)), heads, SCALE


def run_kernels(cases: list[Case], device: torch.device, folder: Path) -> list[Result]:
    """Run the kernels on the GPU or in the interpreter."""
    if device.type == "cuda":
        return run(cases)
    torch.save(cases, folder / "cases")
    run_python([run_outlook.__file__, str(folder / "cases"), str(folder / "results")], TRITON_INTERPRET="1")
    found: list[Result] = torch.load(folder / "results")
    return found


def run_python(arguments: list[str], **variables: str) -> None:
    """Run Python and wait for its end; TRITON_INTERPRET is set only if it is in `variables`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr


def test_outputs_and_gradients_equal_the_reference(device: torch.device, tmp_path: Path) -> None:
    cases = [case(shape, dtype, device) for dtype, _, shape in CASES]
    for (dtype, tolerance, _), given, (runs, found) in zip(
        CASES, cases, run_kernels(cases, device, tmp_path), strict=True
    ):
        assert runs == ["softmax_sums", "aggregate_windows", "logits_backward", "aggregate_windows"]
        assert [tensor.dtype for tensor in found] == [dtype] * 3
        values, scores, grad_output, heads, scale = given
        exact = [tensor.double().requires_grad_() for tensor in (values, scores)]
        plain = plain_outlook(*exact, [*scores.shape[1:3], heads, 3, 1, 2], scale)
        expected = [plain, *torch.autograd.grad(plain, exact, grad_output.double())]
        for ours, right in zip(found, expected, strict=True):
            assert (ours - right).abs().max() <= tolerance * right.abs().max()


def test_results_are_deterministic(device: torch.device, tmp_path: Path) -> None:
    shape = (1, 2, 2, 1, 4) if device.type == "cpu" else (32, 28, 28, 6, 32)
    (_, first), (_, second) = run_kernels([case(shape, torch.float32, device)] * 2, device, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
