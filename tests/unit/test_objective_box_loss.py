"""SSD's loss against a loop over images, in fp32 and half precision, with and without boxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_volo.dense.anchors import BoxTargets, detection_loss

ANCHORS, CLASSES = 60, 5


def random_outputs(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    values = 2 * torch.randn(batch, ANCHORS, 4, generator=random)
    return values, 3 * torch.randn(batch, ANCHORS, CLASSES + 1, generator=random)


def random_targets(positives: list[int], seed: int) -> BoxTargets:
    """Return boxes and classes of images with so many positive anchors."""
    random = torch.Generator().manual_seed(seed)
    boxes = torch.zeros(len(positives), ANCHORS, 4)
    classes = torch.zeros(len(positives), ANCHORS, dtype=torch.int64)
    for image, count in enumerate(positives):
        chosen = torch.randperm(ANCHORS, generator=random)[:count]
        boxes[image, chosen] = 2 * torch.randn(count, 4, generator=random)
        classes[image, chosen] = torch.randint(1, CLASSES + 1, (count,), generator=random)
    return BoxTargets(classes, boxes)


def loss_by_loops(values: Tensor, logits: Tensor, targets: BoxTargets) -> tuple[float, float]:
    """Return the terms of boxes and of classes, in double precision."""
    classes, boxes = targets
    of_boxes, of_classes = 0.0, 0.0
    for image in range(len(values)):
        positives = [anchor for anchor in range(ANCHORS) if classes[image, anchor]]
        if not positives:
            continue
        probabilities = logits[image].double().softmax(dim=1)
        negatives = [-float(probabilities[a, 0].log()) for a in range(ANCHORS) if a not in positives]
        hardest = sorted(negatives, reverse=True)[: 3 * len(positives)]
        entropy, distance = sum(hardest), 0.0
        for anchor in positives:
            entropy -= float(probabilities[anchor, classes[image, anchor]].log())
            for error in (values[image, anchor].double() - boxes[image, anchor].double()).abs().tolist():
                distance += error**2 / 2 if error < 1 else error - 0.5
        of_boxes += distance / len(positives)
        of_classes += entropy / len(positives)
    return of_boxes / len(values), of_classes / len(values)


@pytest.mark.parametrize(
    "positives",
    [
        [4, 1, 7],
        [3, 0, 5, 0],
        [0, 0],
        [15, 16],  # three quarters of the anchors are background, then less: all count
        [ANCHORS, 2],  # no background anchor
    ],
)
def test_the_loss_equals_a_loop_over_images(positives: list[int]) -> None:
    outputs, targets = random_outputs(len(positives), seed=1), random_targets(positives, seed=2)
    loss = detection_loss(*outputs, targets)
    of_boxes, of_classes = loss_by_loops(*outputs, targets)
    assert float(loss.box_loss) == pytest.approx(of_boxes, rel=1e-6)
    assert float(loss.class_loss) == pytest.approx(of_classes, rel=1e-6)
    assert float(loss.total) == pytest.approx(of_boxes + of_classes, rel=1e-6)
    assert (float(loss.total) > 0) == any(positives)


@pytest.mark.parametrize("positives", [[0, 0, 0], [2, 0, 9]])
def test_gradients_are_those_of_the_anchors_that_count(positives: list[int]) -> None:
    values, logits = (outputs.requires_grad_() for outputs in random_outputs(3, seed=3))
    targets = random_targets(positives, seed=4)
    detection_loss(values, logits, targets).total.backward()
    assert values.grad is not None
    assert logits.grad is not None
    assert values.grad.isfinite().all()
    assert logits.grad.isfinite().all()
    assert torch.equal(values.grad.any(dim=2), targets.classes > 0)
    counted = logits.grad.any(dim=2)
    assert counted.sum(dim=1).tolist() == [4 * count for count in positives]
    assert counted[targets.classes > 0].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_is_computed_in_fp32(dtype: torch.dtype) -> None:
    values, logits = (outputs.to(dtype) for outputs in random_outputs(3, seed=8))
    targets = random_targets([3, 0, 8], seed=9)
    expected = detection_loss(values.float(), logits.float(), targets)
    values.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = detection_loss(values, logits.requires_grad_(), targets)
    assert [part.dtype for part in loss] == [torch.float32] * 3
    assert torch.equal(loss.total, expected.total)
    loss.total.backward()
    assert values.grad is not None
    assert values.grad.dtype == dtype
    extreme = (logits.detach().sign() * 6e4).half().requires_grad_()
    loss = detection_loss(values, extreme, targets)
    loss.total.backward()
    assert loss.total.isfinite()
    assert extreme.grad is not None
    assert extreme.grad.isfinite().all()


def test_the_loss_is_computed_without_a_synchronization() -> None:
    # Tensors on meta have no values, so reading one on the host, or a shape that depends on one, is an error.
    values, logits = (outputs.to("meta").requires_grad_() for outputs in random_outputs(2, seed=12))
    targets = BoxTargets(*(target.to("meta") for target in random_targets([1, 2], seed=13)))
    detection_loss(values, logits, targets).total.backward()
    assert values.grad is not None
    assert values.grad.shape == values.shape
