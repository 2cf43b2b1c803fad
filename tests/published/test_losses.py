"""Targets and losses against the published ones, also of maps of several sizes and crops at the edges."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.objective.loss import Targets, build_loss, label_map_targets
from horovod_volo.objective.mixing import NO_BOX, Box
from tests.published.checkouts import PublishedCode
from tests.published.conftest import compare
from tests.published.pairs import (
    CLASSES,
    SIDE,
    box_on,
    dense,
    labels_of,
    published_target,
    published_target_of,
)

BATCH, SEED = 4, 3
# The published maps have 18 x 18 cells; teachers with other image sizes or strides give others. The published
# code multiplies both axes by the width, so it can also read maps that are higher than wide.
CELLS = [(9, 9), (14, 14), (18, 18), (18, 12)]
SIDES = pytest.mark.parametrize("side", [14, 24], ids=["224px", "384px"])
AT_THE_EDGES = torch.tensor(
    [
        [0.0, 0.0, 1.0, 1.0],  # the whole image
        [0.0, 0.0, 1.0, 0.03],  # less than one cell wide
        [0.92, 0.9, 0.08, 0.1],  # the lower right corner
        [0.0, 0.55, 0.5, 0.45],  # along the upper edge to the right corner
        [0.25, 0.0, 0.75, 0.5],  # along the left edge to the lower corner
    ]
)


def assert_equal_targets(
    published: PublishedCode,
    what: str,
    labels: Labels,
    side: int,
    geometry: Literal["reference", "corrected"],
    theirs: Labels | None = None,
) -> Targets:
    """Compare the targets of a batch with the published ones, of the same labels or of `theirs`.

    The published softmax adds 1000 classes one after another. In single precision rounding errors in a target
    are up to 5e-5, so it is computed in double precision.
    """
    target = published_target_of(published, theirs or labels, side, precision=torch.float64)
    ours = label_map_targets(CLASSES, side, 0.1, geometry, False, labels)
    compare(f"{what}, image", dense(ours.classes), target[:, :, 1], 1e-5)
    compare(f"{what}, tokens", dense(ours.tokens), target[:, :, 2:].transpose(1, 2).flatten(0, 1), 1e-5)
    return ours


@SIDES
@pytest.mark.parametrize(
    ("cells", "edges"), [*((each, False) for each in CELLS), *((each, True) for each in CELLS[:3])]
)
def test_targets(published: PublishedCode, cells: tuple[int, int], edges: bool, side: int) -> None:
    labels = labels_of(len(AT_THE_EDGES), SEED, cells)
    if edges:
        labels = replace(labels, maps=replace(labels.maps, boxes=AT_THE_EDGES))
    what = f"targets {'at the edges ' if edges else ''}of {cells[0]} x {cells[1]} cells, {side} x {side}"
    assert_equal_targets(published, what, labels, side, "reference")


@pytest.mark.parametrize("cells", [9, 14, 18])
@SIDES
def test_the_corrected_geometry(published: PublishedCode, cells: int, side: int) -> None:
    """The published code computes it if its boxes have the order of coordinates that it assumes."""
    labels = labels_of(BATCH, SEED, (cells, cells))
    boxes = labels.maps.boxes[:, [1, 0, 3, 2]]
    swapped = replace(labels, maps=replace(labels.maps, boxes=boxes))  # left, top, width, height
    what = f"corrected targets of {cells} x {cells} cells, {side} x {side}"
    ours = assert_equal_targets(published, what, labels, side, "corrected", theirs=swapped)
    reference = label_map_targets(CLASSES, side, 0.1, "reference", False, labels)
    assert (dense(ours.tokens) - dense(reference.tokens)).abs().max() > 0.1


MAPS = Objective(token_label=True, token_label_data="maps", label_geometry="reference", dense_weight=0.5)

TRUTH = {"ground_truth": True}
# The published loss, its settings, and ours.
LOSSES = [
    pytest.param("volo_losses", "TokenLabelGTCrossEntropy", {}, TRUTH, id="volo-with-truth"),
    pytest.param("volo_losses", "TokenLabelCrossEntropy", {}, {}, id="volo"),
    pytest.param("lvvit_losses", "TokenLabelCrossEntropy", TRUTH, TRUTH, id="lvvit-truth"),
    pytest.param("lvvit_losses", "TokenLabelCrossEntropy", {}, {}, id="lvvit"),
]


def random_logits(batch: int = BATCH, side: int = SIDE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    class_logits = 2 * torch.randn(batch, CLASSES, generator=generator)
    token_logits = 2 * torch.randn(batch, side * side, CLASSES, generator=generator)
    return class_logits.requires_grad_(), token_logits.requires_grad_()


def with_half_right_teacher(labels: Labels, target: Tensor) -> tuple[Labels, Tensor]:
    """Change the classes so that the teacher is right about every other image, in both formats."""
    best = target[:, :, 1].argmax(dim=1)
    classes = torch.where(torch.arange(len(best)) % 2 == 0, best, (best + 1) % CLASSES)
    target = target.clone()
    target[:, :, 0] = torch.nn.functional.one_hot(classes, CLASSES) * 0.9 + 0.1 / CLASSES
    return replace(labels, classes=classes), target


def assert_equal(
    what: str, settings: Objective, labels: Labels, box: Box, side: int, loss: Any, target: Tensor
) -> None:
    batch = len(labels.classes)
    own, other = random_logits(batch, side), random_logits(batch, side)
    ours = build_loss(settings, CLASSES, side)(*own, labels, box).total
    theirs = loss((*other, (box.top, box.left, box.top + box.height, box.left + box.width)), target)
    compare(f"{what}, {batch} of {side} x {side}, kept fraction {box.lam:.2f}, loss", ours, theirs)
    ours.backward()
    theirs.backward()
    for one, another in zip(own, other, strict=True):
        torch.testing.assert_close(one.grad, another.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("batch", "side"), [(BATCH, SIDE), (3, SIDE), (5, SIDE), (2, 24), (3, 24)])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "unmixed"])
@pytest.mark.parametrize("maps", [True, False], ids=["maps", "classes"])
@pytest.mark.parametrize(("module", "name", "truth", "ours"), LOSSES)
def test_losses(published, batch, side, mixed, maps, module, name, truth, ours):
    """In an odd batch the middle image is its own MixToken partner. 384 pixels give 24 x 24 tokens."""
    loss = getattr(getattr(published, module), name)(dense_weight=0.5, cls_weight=0.75, **truth)
    labels = labels_of(batch, SEED)
    if maps:
        labels, target = with_half_right_teacher(labels, published_target(published, batch, SEED, side))
        settings = replace(MAPS, cls_weight=0.75, **ours)
    else:
        labels = Labels(labels.classes)
        target = published.targets.mixup_target(labels.classes, CLASSES, smoothing=0.1, device="cpu")
        settings = replace(MAPS, cls_weight=0.75, token_label_data="", **ours)
    what = f"{module}.{name} {ours}{'' if maps else ' without maps'}"
    assert_equal(what, settings, labels, box_on(side) if mixed else NO_BOX, side, loss, target)


def test_the_loss_without_token_labels(published: PublishedCode) -> None:
    classes, (class_logits, token_logits) = labels_of(BATCH, SEED).classes, random_logits()
    target = published.targets.mixup_target(classes, CLASSES, smoothing=0.1, device="cpu")
    theirs = published.volo_losses.SoftTargetCrossEntropy()(class_logits, target)
    parts = build_loss(Objective(), CLASSES, SIDE)(class_logits, token_logits, Labels(classes), NO_BOX)
    compare("loss without token labels", parts.total, theirs)
