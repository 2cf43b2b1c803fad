"""The Triton kernels of the network: outlook attention and the cross-entropy, against the formulas.

On the CPU they run in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_process import INTERPRETED, skip_elsewhere
from torch import Tensor

from horovod_volo.core.operators import use_kernels
from horovod_volo.kernels.network import fused_outlook
from horovod_volo.models.outlook import plain_outlook
from horovod_volo.objective.soft_target import SoftTarget, cross_entropy
from tests.unit.published_targets import dense

pytest.importorskip("triton")

SCALE = 0.7
# dtype, tolerance, (batch, height, width, heads, head_dim): first more cells than one program computes, then
# odd and small sizes
OUTLOOK_CASES = [
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

    def widened(self: Any, operand: Any) -> Any:
        return self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

    def multiply_widened(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return multiply(self, widened(self, a), widened(self, b), *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_widened)


def outlook_case(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    batch, height, width, heads, depth = shape
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(batch, height, width, heads * depth, generator=draw)
    scores = torch.randn(batch, -(-height // 2), -(-width // 2), heads * 81, generator=draw)
    grad_output = torch.randn(values.shape, generator=draw)
    return [tensor.to(device, dtype) for tensor in (values, scores, grad_output)]


def by_kernels(values: Tensor, scores: Tensor, grad_output: Tensor, heads: int) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
    mixed, _ = fused_outlook(*inputs, heads, SCALE)
    return [mixed.detach(), *torch.autograd.grad(mixed, inputs, grad_output)]


@pytest.mark.parametrize(("dtype", "tolerance", "shape"), OUTLOOK_CASES)
def test_outputs_and_gradients_equal_the_reference(dtype, tolerance, shape, device):
    skip_elsewhere(device)
    values, scores, grad_output = outlook_case(shape, dtype, device)
    found = by_kernels(values, scores, grad_output, shape[3])
    exact = [tensor.double().requires_grad_() for tensor in (values, scores)]
    plain = plain_outlook(*exact, [*scores.shape[1:3], shape[3], 3, 1, 2], SCALE)
    expected = [plain, *torch.autograd.grad(plain, exact, grad_output.double())]
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - right).abs().max() <= tolerance * right.abs().max()


def test_outlook_is_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    shape = (1, 2, 2, 1, 4) if device.type == "cpu" else (32, 28, 28, 6, 32)
    inputs = outlook_case(shape, torch.float32, device)
    first, second = (by_kernels(*inputs, shape[3]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding of the result


@pytest.fixture
def kernel(device: torch.device) -> ModuleType:
    """Return the kernels' module, compiled for the GPU or interpreted on the CPU."""
    skip_elsewhere(device)
    return importlib.import_module("horovod_volo.kernels.network")


def random_case(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, entries: int
) -> tuple[Tensor, SoftTarget, Tensor]:
    """Draw logits, targets whose ids repeat, and a weight for each row's loss."""
    random = torch.Generator().manual_seed(classes + entries)
    logits = (torch.randn(rows, classes, generator=random) * 4).to(device, dtype)
    target = SoftTarget(
        uniform=(torch.rand(rows, generator=random) / classes).to(device),
        # 7 different ids, spread over all classes.
        ids=(torch.randint(7, (rows, entries), generator=random) * (classes - 1) // 6).to(device),
        weights=torch.randn(rows, entries, generator=random).mul(0.3).to(device),
    )
    return logits, target, torch.rand(rows, generator=random).to(device)


def exact(logits: Tensor, target: SoftTarget, grad_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient by the dense formula in float64."""
    leaf = logits.double().requires_grad_()
    loss = -(dense(target, logits.shape[1]) * leaf.log_softmax(dim=1)).sum(dim=1)
    (grad,) = torch.autograd.grad(loss, leaf, grad_loss.double())
    return loss.detach(), grad


# Rows, classes and entries; the entries of the last are merged in a table.
SHAPES = [(3, 1, 1), (2, 5, 3), (3, 1000, 45), (2, 9000, 150), (2, 1000, 1100)]
CASES = 2 * 3 * len(SHAPES) + 3 + 1 + 3 + 1 + len(OUTLOOK_CASES) + 1  # number of tests on one device


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "classes", "entries"), SHAPES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_loss_and_gradient_equal_the_dense_formula(kernel, device, dtype, rows, classes, entries, overwrite):
    logits, target, grad_loss = random_case(device, dtype, rows, classes, entries)
    expected_loss, expected_grad = exact(logits, target, grad_loss)
    sparse = (target.uniform, target.ids, target.weights)
    loss, lse = kernel.loss_with_lse(logits, *sparse)
    grad = logits if overwrite else torch.full_like(logits, torch.nan)
    kernel.write_gradient(grad, logits, lse, grad_loss, *sparse)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCES[dtype]
    # The gradient of a class with an entry is rounded twice, at the magnitude of the subtracted weight.
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2 * tolerance, atol=2 * tolerance)


def test_both_ways_of_merging_classes_give_one_gradient(kernel, device, monkeypatch):
    """Compared with each other, and in a table: equal but for the rounding of fp32 sums."""
    logits, target, grad_loss = random_case(device, torch.float32, 3, 700, 300)
    sparse = (target.uniform, target.ids, target.weights)
    _, lse = kernel.loss_with_lse(logits, *sparse)
    grads = []
    for limit in (100, 1000):
        monkeypatch.setattr(kernel, "_MAX_COMPARED_ENTRIES", limit)
        grads.append(torch.full_like(logits, torch.nan))
        kernel.write_gradient(grads[-1], logits, lse, grad_loss, *sparse)
    assert not torch.equal(*grads)  # the ways are different
    torch.testing.assert_close(*grads, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_gradient_is_deterministic(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    logits, target, grad_loss = random_case(device, dtype, 4, 1500, 300)
    sparse = (target.uniform, target.ids, target.weights)
    grads = []
    for _ in range(3):
        _, lse = kernel.loss_with_lse(logits, *sparse)
        grads.append(torch.empty_like(logits))
        kernel.write_gradient(grads[-1], logits, lse, grad_loss, *sparse)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_the_loss_of_large_logits_is_finite(kernel: ModuleType, device: torch.device) -> None:
    logits, target, grad_loss = random_case(device, torch.float32, 3, 5000, 10)
    logits *= 1000
    loss, lse = kernel.loss_with_lse(logits, target.uniform, target.ids, target.weights)
    expected, _ = exact(logits, target, grad_loss)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-2)
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_autograd_equals_the_dense_formula(device: torch.device, dtype: torch.dtype) -> None:
    """The CPU uses torch operations, the GPU the kernels."""
    use_kernels(["loss"])
    logits, target, grad_loss = random_case(device, dtype, 4, 300, 20)
    expected_loss, expected_grad = exact(logits, target, grad_loss)
    tolerance = TOLERANCES[dtype]
    for overwrite in (False, True):
        given = logits.clone().requires_grad_().clone()
        loss = cross_entropy(given, target, overwrite=overwrite)
        (grad,) = torch.autograd.grad(loss, given, grad_loss)
        assert grad.dtype == dtype
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=2 * tolerance, atol=2 * tolerance)
