"""The fused outlook attention, on a GPU or in Triton's interpreter, against the reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_process import INTERPRETED, run_in_interpreter, skip_elsewhere
from torch import Tensor

from horovod_volo.kernels.network import fused_outlook
from horovod_volo.models.outlook import plain_outlook

pytest.importorskip("triton")

SCALE = 0.7
# dtype, tolerance, (batch, height, width, heads, head_dim): first more cells than one program computes, then
# odd and small sizes
CASES = [
    (torch.float32, 1e-5, (2, 9, 8, 1, 6)),
    (torch.bfloat16, 1e-2, (1, 3, 4, 2, 4)),
    (torch.float16, 1e-3, (2, 1, 1, 1, 8)),
]


@pytest.fixture(autouse=INTERPRETED)
def _bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply bf16 matrices: it would multiply their bits, as integers."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def widened(self: Any, *operands: Any) -> Any:
        return [
            self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in operands
        ]

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *more: multiply(self, *widened(self, a, b), *more),
    )


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return values, attention logits and the gradient of the output."""
    batch, height, width, heads, depth = shape
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(batch, height, width, heads * depth, generator=draw)
    scores = torch.randn(batch, -(-height // 2), -(-width // 2), heads * 81, generator=draw)
    grad_output = torch.randn(values.shape, generator=draw)
    return [tensor.to(device, dtype) for tensor in (values, scores, grad_output)]


def by_kernels(values: Tensor, scores: Tensor, grad_output: Tensor, heads: int) -> list[Tensor]:
    """Return the output and both gradients."""
    inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
    mixed, _ = fused_outlook(*inputs, heads, SCALE)
    return [mixed.detach(), *torch.autograd.grad(mixed, inputs, grad_output)]


@pytest.mark.parametrize(("dtype", "tolerance", "shape"), CASES)
def test_outputs_and_gradients_equal_the_reference(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], device: torch.device
) -> None:
    skip_elsewhere(device)
    values, scores, grad_output = drawn(shape, dtype, device)
    found = by_kernels(values, scores, grad_output, shape[3])
    exact = [tensor.double().requires_grad_() for tensor in (values, scores)]
    plain = plain_outlook(*exact, [*scores.shape[1:3], shape[3], 3, 1, 2], SCALE)
    expected = [plain, *torch.autograd.grad(plain, exact, grad_output.double())]
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - right).abs().max() <= tolerance * right.abs().max()


def test_results_are_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    shape = (1, 2, 2, 1, 4) if device.type == "cpu" else (32, 28, 28, 6, 32)
    inputs = drawn(shape, torch.float32, device)
    first, second = (by_kernels(*inputs, shape[3]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, len(CASES) + 1)
