"""Targets from label maps against the published ones, for maps of several sizes and crops at the edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from horovod_volo.core.batch import Labels
from horovod_volo.objective.loss import LabelMapTargets, Targets
from tests.published.checkouts import PublishedCode, _roi_align, named_folder
from tests.published.conftest import compare
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


def assert_equal(
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
    ours = LabelMapTargets(CLASSES, side, 0.1, geometry)(labels)
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
    assert_equal(published, what, labels, side, "reference")


@pytest.mark.parametrize("cells", [9, 14, 18])
@SIDES
def test_the_corrected_geometry(published: PublishedCode, cells: int, side: int) -> None:
    """The published code computes it if its boxes have the order of coordinates that it assumes."""
    labels = labels_of(BATCH, SEED, (cells, cells))
    assert labels.maps is not None
    boxes = labels.maps.boxes[:, [1, 0, 3, 2]]
    swapped = replace(labels, maps=replace(labels.maps, boxes=boxes))  # left, top, width, height
    what = f"corrected targets of {cells} x {cells} cells, {side} x {side}"
    ours = assert_equal(published, what, labels, side, "corrected", theirs=swapped)
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
