"""Soft targets and their cross-entropy against the dense formulas."""

from __future__ import annotations

from collections.abc import Callable

import published_targets as published
import pytest
import torch
from torch import Tensor

from horovod_volo.objective import soft_target
from horovod_volo.objective.soft_target import SoftTarget, blend, cross_entropy, one_hot, smoothed


def random_target(rows: int, entries: int, num_classes: int, seed: int) -> SoftTarget:
    """Draw a target whose ids repeat and whose weights may be negative."""
    generator = torch.Generator().manual_seed(seed)
    return SoftTarget(
        uniform=torch.rand(rows, generator=generator) / num_classes,
        ids=torch.randint(num_classes, (rows, entries), generator=generator),
        weights=torch.randn(rows, entries, generator=generator) * 0.3,
    )


def oracle(logits: Tensor, target: SoftTarget) -> tuple[Tensor, Tensor]:
    """Return the dense loss per row in float64, and the gradient of sum(row number x loss)."""
    leaf = logits.detach().double().requires_grad_()
    loss = -(published.dense(target, logits.shape[1]) * leaf.log_softmax(dim=1)).sum(dim=1)
    (loss * torch.arange(1, len(loss) + 1)).sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def ours(logits: Tensor, target: SoftTarget) -> tuple[Tensor, Tensor]:
    """Return the loss per row and the same gradient."""
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy(leaf, target)
    (loss * torch.arange(1, len(loss) + 1)).sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(("entries", "num_classes"), [(1, 3), (4, 10), (30, 10), (45, 1000)])
def test_cross_entropy_equals_the_dense_formula(entries: int, num_classes: int) -> None:
    target = random_target(6, entries, num_classes, seed=entries)
    logits = torch.randn(6, num_classes, generator=torch.Generator().manual_seed(1)) * 3
    loss, grad = ours(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-5)


def test_the_loss_of_large_logits_is_finite() -> None:
    target = one_hot(torch.tensor([0, 1]), 3, 0.1)
    logits = torch.tensor([[300.0, -300.0, 0.0], [1e3, 1e3, -1e3]])
    loss, grad = ours(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    # A logit of 1,000 is rounded by up to 6e-5.
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-4)
    for found, expected in zip(loss_in_place(logits, target), (expected_loss, expected_grad), strict=False):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_add_only_their_own_rounding(dtype: torch.dtype) -> None:
    target = random_target(5, 8, 1000, seed=2)
    logits = (torch.randn(5, 1000, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    loss, grad = ours(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=1e-2, atol=1e-6)


def test_autocast_does_not_change_the_loss() -> None:
    target = random_target(4, 3, 50, seed=4)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    loss, grad = ours(logits, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_loss, cast_grad = ours(logits, target)
    assert torch.equal(loss, cast_loss)
    assert torch.equal(grad, cast_grad)


def test_a_target_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="4 rows of logits, but 1 rows"):
        cross_entropy(torch.zeros(4, 5), one_hot(torch.tensor([2]), 5, 0.1))


def loss_in_place(logits: Tensor, target: SoftTarget) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss per row, its gradient, and the logits that the gradient has overwritten."""
    given = logits.detach().clone().requires_grad_().clone()
    loss = cross_entropy(given, target, overwrite=True)
    (grad,) = torch.autograd.grad((loss * torch.arange(1, len(loss) + 1)).sum(), given)
    return loss.detach(), grad, given


@pytest.mark.parametrize("block", [1, 2500, 1 << 20])  # one row, some rows, all rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_in_place_form_writes_the_gradient_over_the_logits(
    block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soft_target, "_BLOCK", block)
    target = random_target(6, 30, 1001, seed=9)
    logits = (torch.randn(6, 1001, generator=torch.Generator().manual_seed(10)) * 3).to(dtype)
    loss, grad, given = loss_in_place(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    assert grad.dtype == dtype
    assert grad.data_ptr() == given.data_ptr()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    bounds = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-6)
    torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=bounds[0], atol=bounds[1])


def leaf(logits: Tensor) -> Tensor:
    return logits.requires_grad_()


def view_of_a_leaf(logits: Tensor) -> Tensor:
    return logits.unsqueeze(0).requires_grad_().flatten(0, 1)


def without_gradient(logits: Tensor) -> Tensor:
    return logits


@pytest.mark.parametrize("make", [leaf, view_of_a_leaf, without_gradient])
def test_leaves_and_logits_without_gradient_are_not_overwritten(make: Callable[[Tensor], Tensor]) -> None:
    target = random_target(4, 3, 50, seed=11)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(12))
    before, given = logits.clone(), make(logits)
    loss = cross_entropy(given, target, overwrite=True)
    if given.requires_grad:
        loss.sum().backward()
    assert torch.equal(given, before)
    given = logits.detach().requires_grad_() * 1.0
    with torch.no_grad():  # as in an evaluation
        cross_entropy(given, target, overwrite=True)
    assert torch.equal(given, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_is_an_error(dtype: torch.dtype) -> None:
    target = random_target(4, 3, 50, seed=11)
    given = torch.randn(4, 50, generator=torch.Generator().manual_seed(12), dtype=dtype).requires_grad_() * 1
    loss = cross_entropy(given, target, overwrite=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_that_needs_the_logits_is_an_error(dtype: torch.dtype) -> None:
    target = random_target(4, 3, 50, seed=11)
    given = torch.zeros(4, 50, dtype=dtype).requires_grad_().exp()  # the backward of exp reads its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(given, target, overwrite=True).sum().backward()


def test_one_hot_has_mass_one() -> None:
    target = one_hot(torch.tensor([2, 0]), 4, 0.2)
    expected = torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(published.dense(target, 4), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(target.uniform * 4 + target.weights.sum(dim=1), torch.ones(2))


def test_smoothing_adds_the_published_excess() -> None:
    target = SoftTarget(torch.tensor([0.1]), torch.tensor([[1, 3]]), torch.tensor([[0.2, 0.4]]))  # mass 1
    expected = published.smooth(published.dense(target, 4), 0.1)
    torch.testing.assert_close(published.dense(smoothed(target, 4, 0.1), 4), expected, rtol=1e-6, atol=1e-7)
    target = smoothed(target, 4, 0.1)
    torch.testing.assert_close(target.uniform * 4 + target.weights.sum(dim=1), torch.tensor([1.025]))


@pytest.mark.parametrize("weight", [0.7, torch.tensor([0.0, 0.25, 1.0])])
def test_blend_equals_the_dense_mixture(weight: float | Tensor) -> None:
    first, second = random_target(3, 2, 6, seed=6), random_target(3, 5, 6, seed=7)
    column = weight.unsqueeze(1) if isinstance(weight, Tensor) else weight
    expected = column * published.dense(first, 6) + (1 - column) * published.dense(second, 6)
    torch.testing.assert_close(
        published.dense(blend(first, second, weight), 6), expected, rtol=1e-6, atol=1e-6
    )
