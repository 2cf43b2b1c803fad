"""Targets from label maps against the published ones, for maps of several sizes and crops at the edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from horovod_volo.objective.loss import LabelMapTargets, Targets
from tests.published.checkouts import PublishedCode, _roi_align, named_folder
from tests.published.conftest import Compare
from tests.published.examples import CLASSES, dense, labels_of, published_target_of

named_folder()  # skips this module without checkouts

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


# In single precision the published softmax adds 1000 classes one after another, with rounding errors of up to
# 5e-5 in a target. In double precision the published targets differ ten times less from ours.
PRECISIONS = pytest.mark.parametrize(
    ("precision", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-5)], ids=["single", "double"]
)


def assert_equal(
    compare: Compare,
    what: str,
    ours: Targets,
    target: Tensor,
    tolerance: float,
) -> None:
    """Compare the targets of a batch with published ones, (batch, classes, 2 + tokens)."""
    tokens = target[:, :, 2:].transpose(1, 2).flatten(0, 1)
    compare(f"{what}, image", dense(ours.classes), target[:, :, 1], tolerance)
    compare(f"{what}, tokens", dense(ours.tokens), tokens, tolerance)


@SIDES
@PRECISIONS
@pytest.mark.parametrize(
    ("cells", "edges"), [*((each, False) for each in CELLS), *((each, True) for each in CELLS[:3])]
)
def test_targets(
    published: PublishedCode,
    compare: Compare,
    cells: tuple[int, int],
    edges: bool,
    side: int,
    precision: torch.dtype,
    tolerance: float,
) -> None:
    labels = labels_of(len(AT_THE_EDGES), SEED, cells)
    if edges:
        labels = replace(labels, maps=replace(labels.maps, boxes=AT_THE_EDGES))
    target = published_target_of(published, labels, side, precision=precision)
    ours = LabelMapTargets(CLASSES, side, 0.1, "reference")(labels)
    what = f"targets {'at the edges ' if edges else ''}of {cells[0]} x {cells[1]} cells, {side} x {side}"
    assert_equal(compare, f"{what}, {precision}", ours, target, tolerance)


@pytest.mark.parametrize("cells", [9, 14, 18])
@SIDES
def test_the_corrected_geometry(published: PublishedCode, compare: Compare, cells: int, side: int) -> None:
    """The published code computes it if its boxes have the order of coordinates that it assumes."""
    labels = labels_of(BATCH, SEED, (cells, cells))
    assert labels.maps is not None
    boxes = labels.maps.boxes[:, [1, 0, 3, 2]]
    swapped = replace(labels, maps=replace(labels.maps, boxes=boxes))  # left, top, width, height
    target = published_target_of(published, swapped, side, precision=torch.float64)
    ours = LabelMapTargets(CLASSES, side, 0.1, "corrected")(labels)
    what = f"corrected targets of {cells} x {cells} cells, {side} x {side}"
    assert_equal(compare, what, ours, target, tolerance=1e-5)
    reference = LabelMapTargets(CLASSES, side, 0.1, "reference")(labels)
    assert (dense(ours.tokens) - dense(reference.tokens)).abs().max() > 0.1


def test_averages_of_classes_that_no_cell_has_are_zero() -> None:
    """`_roi_align` does not compute them; the published code must give the same."""
    maps = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(SEED))
    boxes = torch.tensor([[0, 0.5, 1.0, 6.0, 7.5], [1, -0.5, 2.0, 3.0, 8.5]])
    whole = _roi_align(maps, boxes, (14, 14))
    maps[:, 1::2] = 0.0
    shown = _roi_align(maps, boxes, (14, 14))
    assert torch.equal(shown[:, ::2], whole[:, ::2])
    assert not shown[:, 1::2].any()
