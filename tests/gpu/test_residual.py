"""The Triton kernels of a residual branch against PyTorch's LayerNorm, indexing and addition.

On the CPU they run in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo import kernels
from horovod_volo.kernels import residual, use_fused_kernels
from horovod_volo.kernels.residual import add_branch, normalized_branch
from horovod_volo.models import lvvit, volo
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.drop_path import DropPathSample, sample_drop_path

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    residual._PROGRAMS = 4  # the interpreter runs one after another
BATCH, SCALE = 5, 1.25
# Which images the branch computes: all, by number, all but with dropped ones, and one alone.
ROWS = {"all": None, "index": [3, 0, 4], "masked": [0, -1, 2, 3, -1], "one": [2]}
SHAPES = [(7, 48), (2, 3, 384), (1, 5)]  # of an image: tokens and channels
# Of the residual stream and of the branch: as in fp32, under autocast, and where the stream is in bf16.
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
CASES = len(ROWS) * len(SHAPES) * len(DTYPES) + 1  # on one device
NETWORKS = 2


def skip_elsewhere(device: torch.device) -> None:
    """Skip a test of the kernels where they do not run."""
    if (device.type == "cpu") != INTERPRETED:
        pytest.skip("runs in the interpreter's process" if device.type == "cpu" else "runs compiled")


def maps_of(rows: list[int] | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows and their inverse."""
    if rows is None:
        return None, None
    position = [-1] * BATCH
    for place, row in enumerate(rows):
        if row >= 0:
            position[row] = place
    return torch.tensor(rows, device=device), torch.tensor(position, device=device)


def by_kernels(
    tokens: Tensor, norm: nn.LayerNorm, matrix: Tensor, rows: list[int] | None, dtype: torch.dtype
) -> Tensor:
    computed, position = maps_of(rows, tokens.device)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", dtype != tokens.dtype)
    try:
        skip, normed = normalized_branch(tokens, norm, computed, position)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert normed.dtype == dtype
    return add_branch(skip, normed @ matrix.to(dtype), computed, position, SCALE)


def by_torch(tokens: Tensor, norm: nn.LayerNorm, matrix: Tensor, rows: list[int] | None) -> Tensor:
    """Compute the same, in float64, for all images, and mask it."""
    weight, bias = norm.weight, norm.bias
    assert weight is not None
    normed = F.layer_norm(tokens, tokens.shape[-1:], weight, bias, norm.eps)
    keeps = torch.ones(BATCH) if rows is None else torch.zeros(BATCH)
    for row in rows or ():
        keeps[row if row >= 0 else []] = 1
    shape = (BATCH, *[1] * (tokens.ndim - 1))
    return tokens + SCALE * (normed @ matrix) * keeps.to(tokens.device, tokens.dtype).view(shape)


@pytest.mark.parametrize("stream_and_branch", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_branch_and_its_gradients_equal_torchs(
    device: torch.device,
    rows: str,
    shape: tuple[int, ...],
    stream_and_branch: tuple[torch.dtype, torch.dtype],
) -> None:
    skip_elsewhere(device)
    stream, dtype = stream_and_branch
    random = torch.Generator().manual_seed(0)
    tokens, above = ((torch.randn(BATCH, *shape, generator=random) + 0.5).to(device, stream) for _ in "ab")
    matrix = torch.randn(shape[-1], shape[-1], generator=random).to(device) / shape[-1] ** 0.5
    norm = nn.LayerNorm(shape[-1]).to(device)
    for parameter in norm.parameters():
        parameter.data += 0.3 * torch.randn(shape[-1], generator=random).to(device)
    exact = nn.LayerNorm(shape[-1], dtype=torch.float64).to(device)
    exact.load_state_dict(norm.state_dict())

    leaf, exact_leaf = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    ours = by_kernels(leaf, norm, matrix, ROWS[rows], dtype)
    right = by_torch(exact_leaf, exact, matrix.double(), ROWS[rows])
    assert ours.dtype == stream
    found = torch.autograd.grad(ours, [leaf, *norm.parameters()], above)
    wanted = torch.autograd.grad(right, [exact_leaf, *exact.parameters()], above.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # of the largest value
    for what, one, other in zip(
        ("sum", "tokens", "weight", "bias"), (ours, *found), (right, *wanted), strict=True
    ):
        difference = (one.double() - other).abs().max()
        assert difference <= tolerance * other.abs().max(), (what, float(difference))


def test_gradients_are_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    tokens = torch.randn(BATCH, 9, 24, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    norm, matrix = nn.LayerNorm(24).to(device), torch.eye(24, device=device)
    runs = [
        torch.autograd.grad(
            by_kernels(tokens, norm, matrix, ROWS["masked"], torch.float32).square().sum(),
            [tokens, *norm.parameters()],
        )
        for _ in range(3)
    ]
    assert all(torch.equal(one, first) for run in runs for one, first in zip(run, runs[0], strict=True))


def network_pass(name: str, *, fused: bool) -> tuple[list[Tensor], int, int]:
    """Return logits and gradients of a network, and how many branches were masked and indexed."""
    torch.manual_seed(0)
    network = build_model(name, img_size=32, num_classes=5, drop_path=0.6).train()
    images = torch.randn(6, 3, 32, 32)
    use_fused_kernels(fused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_DEVICES", ("cpu", "cuda", "meta"))
        kept: list[DropPathSample] = []

        def recorded(*given: Any) -> list[DropPathSample]:
            kept.extend(sample_drop_path(*given))
            return kept

        for family in (volo, lvvit):
            patch.setattr(family, "sample_drop_path", recorded)
        logits = training_forward(network)(images, lambda tokens: tokens, 7)
        loss = sum(each.float().square().sum() for each in logits)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
    use_fused_kernels(True)
    masked = sum(sample.masked for sample in kept)
    return [*logits, *gradients], masked, sum(sample.rows is not None for sample in kept) - masked


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_a_network_is_the_same_with_fused_kernels(name: str) -> None:
    """Logits and gradients, with the same images dropped; in float32."""
    if not INTERPRETED:
        pytest.skip("runs in the interpreter's process")
    plain, *_ = network_pass(name, fused=False)
    fused, masked, indexed = network_pass(name, fused=True)
    assert masked >= 1
    assert indexed >= 1
    for ours, expected in zip(fused, plain, strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-3)


def test_the_kernels_compile_for_three_generations_without_spilling() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_residual.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 4 * 3 * 3
    for line in lines:
        *_, registers, spilled = line.split()
        assert int(registers) <= 168, line  # three programs of 128 threads on a multiprocessor
        assert int(spilled) == 0, line


def test_the_kernels_in_the_interpreter() -> None:
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "cpu or network",
        __file__,
    ]
    found = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{CASES + NETWORKS} passed" in found.stdout, found.stdout
