"""The complete loss against the dense published formula in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import published_targets as published
import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor

from horovod_volo.bench.comparison import peak_extra_bytes
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import LabelMaps, Labels
from horovod_volo.objective.label_map import Geometry
from horovod_volo.objective.loss import LossParts, build_loss
from horovod_volo.objective.mixing import NO_BOX, Box

BATCH, CLASSES, SIDE = 4, 12, 3
TEACHER = Objective(token_label=True, token_label_data="maps", cls_weight=0.75, dense_weight=0.5)
BOX = Box(top=0, left=1, height=2, width=2, grid=SIDE)


def labels_with_maps(seed: int = 1) -> Labels:
    scores, ids, boxes = published.random_maps(BATCH, 3, 6, 6, CLASSES, seed)
    classes = torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return Labels(classes, LabelMaps(scores, ids, boxes))


def random_logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    class_logits = torch.randn(BATCH, CLASSES, generator=generator)
    token_logits = torch.randn(BATCH, SIDE * SIDE, CLASSES, generator=generator)
    return class_logits, token_logits


def teacher_targets(labels: Labels, settings: Objective) -> tuple[Tensor, Tensor]:
    """Return the smoothed teacher targets, (batch, classes) and (batch, tokens, classes)."""
    assert labels.maps is not None
    maps = (labels.maps.scores, labels.maps.ids, labels.maps.boxes)
    crop = published.batch_target(*maps, 1, CLASSES, settings.label_geometry).squeeze(1)
    tokens = published.batch_target(*maps, SIDE, CLASSES, settings.label_geometry)
    return published.smooth(crop, settings.smoothing), published.smooth(tokens, settings.smoothing)


def published_loss(
    class_logits: Tensor, token_logits: Tensor, class_target: Tensor, token_target: Tensor, lam: float
) -> LossParts:
    """Mix the class target and add the two weighted terms."""
    mixed = lam * class_target + (1 - lam) * class_target.flip(0)
    class_loss = published.cross_entropy(class_logits, mixed)
    token_loss = published.cross_entropy(token_logits.flatten(0, 1), token_target.flatten(0, 1))
    return LossParts(
        TEACHER.cls_weight * class_loss + TEACHER.dense_weight * token_loss, class_loss, token_loss
    )


def assert_equal_with_gradients(
    settings: Objective, labels: Labels, box: Box, class_target: Tensor, token_target: Tensor
) -> None:
    """Compare all three parts, and the total's gradients, with the published formula."""
    logits = [tensor.requires_grad_() for tensor in random_logits()]
    exact = [tensor.detach().double().requires_grad_() for tensor in logits]
    parts = build_loss(settings, CLASSES, SIDE)(*logits, labels, box)
    expected = published_loss(*exact, class_target, token_target, box.lam)
    for part, expected_part in zip(parts, expected, strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.double(), expected_part, rtol=1e-5, atol=1e-5)
    parts.total.backward()
    expected.total.backward()
    for ours, theirs in zip(logits, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("geometry", get_args(Geometry))
@pytest.mark.parametrize("box", [BOX, NO_BOX])
def test_label_maps(geometry: Geometry, box: Box) -> None:
    settings = replace(TEACHER, label_geometry=geometry)
    labels = labels_with_maps()
    assert_equal_with_gradients(settings, labels, box, *teacher_targets(labels, settings))


def test_ground_truth_weighs_an_agreeing_teacher_by_half() -> None:
    settings = replace(TEACHER, ground_truth=True)
    labels = labels_with_maps()
    teacher, tokens = teacher_targets(labels, settings)
    # Two images whose teacher is right, two whose teacher is wrong.
    classes = teacher.argmax(dim=1)
    classes[2:] = (classes[2:] + 1) % CLASSES
    labels = replace(labels, classes=classes)
    truth = published.smooth(published.one_hot(classes, CLASSES), 0.0)
    truth = truth * (1 - settings.smoothing) + settings.smoothing / CLASSES
    weight = torch.tensor([0.5, 0.5, 0.9, 0.9], dtype=torch.float64).unsqueeze(1)
    assert_equal_with_gradients(settings, labels, BOX, weight * teacher + (1 - weight) * truth, tokens)


def test_without_maps_each_token_has_the_target_of_the_class() -> None:
    labels = labels_with_maps()
    one_hot = published.one_hot(labels.classes, CLASSES) * 0.9 + 0.1 / CLASSES
    tokens = one_hot.unsqueeze(1).expand(BATCH, SIDE * SIDE, CLASSES)
    settings = replace(TEACHER, token_label_data="")
    assert_equal_with_gradients(settings, Labels(labels.classes), BOX, one_hot, tokens)


def test_without_token_labels_the_loss_is_that_of_the_mixed_class() -> None:
    labels = labels_with_maps()
    class_logits, token_logits = (tensor.requires_grad_() for tensor in random_logits())
    settings = Objective(cls_weight=0.75)
    parts = build_loss(settings, CLASSES, SIDE)(class_logits, token_logits, Labels(labels.classes), BOX)
    target = published.one_hot(labels.classes, CLASSES) * 0.9 + 0.1 / CLASSES
    mixed = BOX.lam * target + (1 - BOX.lam) * target.flip(0)
    expected = published.cross_entropy(class_logits.detach().double(), mixed)
    torch.testing.assert_close(parts.class_loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.total, 0.75 * parts.class_loss)
    assert parts.token_loss == 0
    parts.total.backward()
    assert token_logits.grad is None
    assert class_logits.grad is not None


def test_a_batch_without_label_maps_is_refused_where_the_settings_name_some() -> None:
    with pytest.raises(ValueError, match="label maps, but the batch has none"):
        build_loss(TEACHER, CLASSES, SIDE)(*random_logits(), Labels(torch.zeros(BATCH).long()), NO_BOX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tensor_is_larger_than_the_token_logits(dtype: torch.dtype) -> None:
    num_classes, side = 5000, 4
    labels = labels_with_maps()
    class_logits = torch.zeros(BATCH, num_classes, dtype=dtype, requires_grad=True)
    token_logits = torch.zeros(BATCH, side * side, num_classes, dtype=dtype, requires_grad=True)
    loss = build_loss(replace(TEACHER, ground_truth=True), num_classes, side)
    with LargestTensor() as recorder:
        loss(class_logits, token_logits, labels, BOX).total.backward()
    assert recorder.elements == token_logits.numel()


def test_logits_that_are_not_a_leaf_are_overwritten_by_their_gradient() -> None:
    num_classes, side = 5000, 4
    labels = labels_with_maps()
    generator = torch.Generator().manual_seed(2)
    leaf = torch.randn(BATCH, side * side, num_classes, generator=generator).requires_grad_()
    class_logits = torch.zeros(BATCH, num_classes, requires_grad=True)
    loss = build_loss(TEACHER, num_classes, side)
    loss(class_logits, leaf, labels, BOX).total.backward()
    assert leaf.grad is not None

    grads: list[Tensor] = []
    given = leaf.detach().clone().requires_grad_() * 1.0

    def loss_and_gradient() -> None:
        total = loss(class_logits, given, labels, BOX).total
        grads.extend(torch.autograd.grad(total, given))

    extra = peak_extra_bytes(loss_and_gradient, torch.device("cpu"))
    assert extra < given.numel() * given.element_size() / 4
    torch.testing.assert_close(grads[0], leaf.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("settings", [Objective(token_label=True), TEACHER], ids=["class", "teacher"])
def test_without_a_weight_for_tokens_no_token_logits_are_needed(settings: Objective) -> None:
    """The network then has no auxiliary head."""
    labels, (class_logits, token_logits) = labels_with_maps(), random_logits()
    expected = build_loss(settings, CLASSES, SIDE)(class_logits, token_logits, labels, BOX)
    loss = build_loss(replace(settings, dense_weight=0.0), CLASSES, SIDE)
    found = loss(class_logits, token_logits[:, :0], labels, BOX)
    torch.testing.assert_close(found.class_loss, expected.class_loss)
    torch.testing.assert_close(found.total, settings.cls_weight * expected.class_loss)
    assert float(found.token_loss) == 0.0
