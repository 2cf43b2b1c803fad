"""The binary cross-entropy against the dense one of torch and that of timm."""

from __future__ import annotations

from dataclasses import replace

import published_targets as published
import pytest
import torch
from test_objective_loss import (
    BOX,
    CLASSES,
    SIDE,
    TEACHER,
    labels_with_maps,
    random_logits,
    teacher_targets,
)
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.objective import soft_target
from horovod_volo.objective.binary_cross_entropy import above, binary_cross_entropy
from horovod_volo.objective.loss import build_loss, check_threshold
from horovod_volo.objective.soft_target import SoftTarget, blend, one_hot

timm_loss = pytest.importorskip("timm.loss")


def random_target(rows: int, entries: int, num_classes: int) -> SoftTarget:
    """Draw a target whose ids repeat."""
    generator = torch.Generator().manual_seed(entries)
    return SoftTarget(
        uniform=torch.rand(rows, generator=generator) / num_classes,
        ids=torch.randint(num_classes, (rows, entries), generator=generator),
        weights=torch.rand(rows, entries, generator=generator) * 0.3,
    )


def dense_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row in float64."""
    return binary_cross_entropy_with_logits(logits.double(), target, reduction="none").mean(dim=1)


@pytest.mark.parametrize("block", [1, 2500, 1 << 20])  # one row, some rows, all rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_it_equals_the_dense_formula(
    block: int, dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soft_target, "_BLOCK", block)
    target = random_target(6, 12, 1001)
    leaf = (torch.randn(6, 1001, generator=torch.Generator().manual_seed(1)) * 30).to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    of_rows = torch.arange(1, 7)
    expected = dense_loss(exact, published.dense(target, 1001))
    (expected * of_rows).sum().backward()
    logits = leaf * 1
    loss = binary_cross_entropy(logits, target, overwrite=in_place)
    (grad,) = torch.autograd.grad((loss * of_rows).sum(), logits)
    assert loss.dtype == torch.float32
    assert (grad.data_ptr() == logits.data_ptr()) == in_place
    assert exact.grad is not None
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        grad, exact.grad.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-8
    )


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
    if not threshold:
        smooth = timm_loss.BinaryCrossEntropy(smoothing=smoothing)(logits.double(), classes)
        torch.testing.assert_close(
            binary_cross_entropy(logits, target).mean().double(), smooth, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("threshold", [0.01, 0.2, 0.35])
def test_a_threshold_makes_targets_of_zeros_and_ones(threshold: float) -> None:
    target = random_target(50, 5, 6)
    dense = published.dense(target, 6)
    assert torch.equal(published.dense(above(target, threshold), 6), (dense > threshold).double())


def test_the_loss_by_name_with_label_maps() -> None:
    settings, labels = replace(TEACHER, loss="bce"), labels_with_maps()
    logits = random_logits()
    class_target, token_target = teacher_targets(labels, settings)
    mixed = BOX.lam * class_target + (1 - BOX.lam) * class_target.flip(0)
    parts = build_loss(settings, CLASSES, SIDE)(*logits, labels, BOX)
    class_loss = dense_loss(logits[0], mixed).mean()
    token_loss = dense_loss(logits[1].flatten(0, 1), token_target.flatten(0, 1)).mean()
    total = settings.cls_weight * class_loss + settings.dense_weight * token_loss
    for part, expected in zip(parts, (total, class_loss, token_loss), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_threshold_below_the_smoothed_target_of_every_class_is_refused() -> None:
    settings = Objective(loss="bce", smoothing=0.1, bce_target_threshold=0.01)
    check_threshold(settings, 1000)
    with pytest.raises(UserError, match="--bce-target-threshold"):
        check_threshold(settings, 10)
