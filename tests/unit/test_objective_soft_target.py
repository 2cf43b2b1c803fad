"""Soft targets, their cross-entropy and their binary cross-entropy against the dense formulas and timm."""

from collections.abc import Callable

import published_targets as published
import pytest
import torch
from torch import Tensor

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.objective import soft_target
from horovod_volo.objective.loss import binary_cross_entropy, check_threshold
from horovod_volo.objective.soft_target import SoftTarget, blend, cross_entropy, one_hot


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
    return loss.detach(), leaf.grad


def ours(logits: Tensor, target: SoftTarget) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy(leaf, target)
    (loss * torch.arange(1, len(loss) + 1)).sum().backward()
    return loss.detach(), leaf.grad


def bounds_of(dtype: torch.dtype) -> dict[str, float]:
    """Return the bounds of a gradient: half precision adds only its own rounding."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("entries", "num_classes"), [(1, 3), (4, 10), (30, 10), (45, 1000)])
def test_cross_entropy_equals_the_dense_formula(entries: int, num_classes: int, dtype: torch.dtype) -> None:
    target = random_target(6, entries, num_classes, seed=entries)
    logits = (torch.randn(6, num_classes, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    loss, grad = ours(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    assert (loss.dtype, grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad.to(dtype), **bounds_of(dtype))


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


def test_autocast_does_not_change_the_loss() -> None:
    target = random_target(4, 3, 50, seed=4)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    loss, grad = ours(logits, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_loss, cast_grad = ours(logits, target)
    assert torch.equal(loss, cast_loss)
    assert torch.equal(grad, cast_grad)


def loss_in_place(logits: Tensor, target: SoftTarget) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss per row, its gradient, and the logits that the gradient has overwritten."""
    given = logits.detach().clone().requires_grad_().clone()
    loss = cross_entropy(given, target, overwrite=True)
    (grad,) = torch.autograd.grad((loss * torch.arange(1, len(loss) + 1)).sum(), given)
    return loss.detach(), grad, given


@pytest.mark.parametrize("block", [1, 2500, 1 << 20])  # one row, some rows, all rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_in_place_form_writes_the_gradient_over_the_logits(block, dtype, monkeypatch):
    monkeypatch.setattr(soft_target, "_BLOCK", block)
    target = random_target(6, 30, 1001, seed=9)
    logits = (torch.randn(6, 1001, generator=torch.Generator().manual_seed(10)) * 3).to(dtype)
    loss, grad, given = loss_in_place(logits, target)
    expected_loss, expected_grad = oracle(logits, target)
    assert grad.dtype == dtype
    assert grad.data_ptr() == given.data_ptr()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad.to(dtype), **bounds_of(dtype))


@pytest.mark.parametrize(
    "make",
    [Tensor.requires_grad_, lambda logits: logits.unsqueeze(0).requires_grad_().flatten(0, 1), Tensor.detach],
    ids=["leaf", "view of a leaf", "without gradient"],
)
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
def test_a_second_backward_or_one_that_needs_the_logits_is_an_error(dtype: torch.dtype) -> None:
    target = random_target(4, 3, 50, seed=11)
    given = torch.randn(4, 50, generator=torch.Generator().manual_seed(12), dtype=dtype).requires_grad_() * 1
    loss = cross_entropy(given, target, overwrite=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    given = torch.zeros(4, 50, dtype=dtype).requires_grad_().exp()  # the backward of exp reads its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(given, target, overwrite=True).sum().backward()


timm_loss = pytest.importorskip("timm.loss")


@pytest.mark.parametrize(("smoothing", "threshold"), [(0.1, 0.0), (0.0, 0.0), (0.1, 0.3), (0.0, 0.6)])
def test_it_is_timms_on_mixed_images(smoothing: float, threshold: float) -> None:
    """Images 1 and 4 are mixed with one of their own class."""
    classes = torch.tensor([0, 3, 5, 2, 3, 1])
    target = one_hot(classes, 7, smoothing)
    mixed = blend(target, target.reversed_batch(), 0.55)
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(2)) * 3
    theirs = timm_loss.BinaryCrossEntropy(target_threshold=threshold or None)
    expected = theirs(logits.double(), published.dense(mixed, 7))
    found = binary_cross_entropy(logits, mixed, threshold).mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    half = binary_cross_entropy(logits.bfloat16(), mixed, threshold)
    assert half.equal(binary_cross_entropy(logits.bfloat16().float(), mixed, threshold))
    if not threshold:
        smooth = timm_loss.BinaryCrossEntropy(smoothing=smoothing)(logits.double(), classes)
        found = binary_cross_entropy(logits, target).mean()
        torch.testing.assert_close(found.double(), smooth, rtol=1e-5, atol=1e-6)


def test_a_threshold_below_the_smoothed_target_of_every_class_is_refused() -> None:
    settings = Objective(loss="bce", smoothing=0.1, bce_target_threshold=0.01)
    check_threshold(settings, 1000)
    with pytest.raises(UserError, match="--bce-target-threshold"):
        check_threshold(settings, 10)
