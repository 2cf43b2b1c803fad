"""Targets from label maps against a dense map, RoIAlign by loops and a softmax over all classes."""

from __future__ import annotations

from typing import Any, get_args

import published_targets as published
import pytest
import torch
from largest_tensor import LargestTensor
from torch import Tensor

from horovod_volo.objective.label_map import Geometry, map_targets, most_probable, roi_weights
from horovod_volo.objective.soft_target import SoftTarget

GEOMETRIES = get_args(Geometry)


def map_target(scores: Tensor, ids: Tensor, boxes: Tensor, *, side: int, **how: Any) -> SoftTarget:
    """Return the targets of one grid."""
    (target,) = map_targets(scores, ids, boxes, sides=(side,), **how)
    return target


def dense_target(
    scores: Tensor, ids: Tensor, boxes: Tensor, side: int, num_classes: int, geometry: Geometry
) -> Tensor:
    """Return our target in dense form, (batch, side x side, classes)."""
    target = map_target(scores, ids, boxes, side=side, num_classes=num_classes, geometry=geometry)
    return published.dense(target, num_classes).unflatten(0, (len(scores), side * side))


SPECIAL_BOXES = [
    (0.0, 0.0, 1.0, 1.0),  # whole image
    (0.0, 0.5, 0.5, 0.5),  # whole numbers of cells, where the number of samples steps up
    (0.96875, 0.9375, 0.03125, 0.0625),  # smaller than a cell, in the last corner: extended beyond the map
    (0.25, 0.0, 0.0625, 1.0),  # a strip
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("height", "width", "side", "k", "num_classes"),
    [
        (18, 18, 14, 5, 40),
        (18, 18, 1, 5, 40),
        (8, 8, 4, 3, 3),  # every class in every cell, so that no class has logit 0
        (8, 8, 8, 3, 12),
        (7, 7, 7, 5, 1000),
        (5, 5, 12, 2, 7),  # more tokens than cells
        (9, 9, 2, 1, 6),
        (1, 1, 3, 2, 5),
        (6, 9, 4, 2, 11),
        (9, 6, 4, 2, 11),
    ],
)
def test_targets_equal_the_published_formula(
    height: int, width: int, side: int, k: int, num_classes: int, geometry: Geometry
) -> None:
    scores, ids, boxes = published.random_maps(6, k, height, width, num_classes, seed=height * side)
    boxes[: len(SPECIAL_BOXES)] = torch.tensor(SPECIAL_BOXES)
    expected = published.batch_target(scores, ids, boxes, side, num_classes, geometry)
    actual = dense_target(scores, ids, boxes, side, num_classes, geometry)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(18, 18), (9, 9), (6, 11), (1, 1)])
@pytest.mark.parametrize("side", [1, 4, 14])
def test_boxes_beyond_their_map_read_its_nearest_cells(height: int, width: int, side: int) -> None:
    scores, ids, _ = published.random_maps(8, 2, height, width, 11, seed=20)
    boxes = torch.tensor(
        [
            [-0.3, 0.1, 1.6, 0.8],  # beyond above and below
            [0.1, -0.25, 0.8, 0.75],  # to the left
            [0.5, 0.5, 0.9, 1.25],  # below and to the right
            [-1.5, 0.2, 1.0, 0.3],  # outside the map
            [0.2, 1.25, 0.3, 1.0],
            [-0.75, -0.5, 2.5, 2.0],
            [0.25, 0.25, 0.5, 0.5],  # inside, in a batch with boxes outside
            [0.98, 0.1, 0.04, 0.5],  # smaller than a cell
        ]
    )
    expected = published.batch_target(scores, ids, boxes, side, 11, "corrected")
    target = map_target(
        scores, ids, boxes, side=side, num_classes=11, geometry="corrected", reach=float(boxes[:, 2:].max())
    )
    actual = published.dense(target, 11).unflatten(0, (8, side * side))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_ids_are_merged_into_distinct_ascending_entries() -> None:
    scores, ids, boxes = published.random_maps(
        2, 3, 8, 8, 4, seed=10
    )  # with 4 classes each window repeats ids
    target = map_target(scores, ids, boxes, side=4, num_classes=4, geometry="corrected")
    for ids_of_row, weights_of_row in zip(target.ids, target.weights, strict=True):
        used = ids_of_row[weights_of_row != 0]
        assert len(used) > 1
        assert torch.equal(used, used.unique())  # unique sorts
    assert not target.ids[:, 4:].any()
    assert not target.weights[:, 4:].any()


@pytest.mark.parametrize("extreme", [1e4, -1e4, 60000.0])
def test_targets_of_extreme_logits_are_finite(extreme: float) -> None:
    scores, ids, boxes = published.random_maps(2, 2, 4, 4, 9, seed=11)
    scores = (scores.sign() * extreme).half()
    expected = published.batch_target(scores, ids, boxes, 2, 9, "corrected")
    torch.testing.assert_close(
        dense_target(scores, ids, boxes, 2, 9, "corrected"), expected, rtol=1e-4, atol=1e-5
    )


def test_negative_logits_of_all_classes_keep_their_order() -> None:
    scores, ids, boxes = published.random_maps(2, 3, 4, 4, 3, seed=17)  # all three classes in every cell
    scores = -1000 - scores
    expected = published.batch_target(scores, ids, boxes, 2, 3, "corrected")
    torch.testing.assert_close(
        dense_target(scores, ids, boxes, 2, 3, "corrected"), expected, rtol=1e-3, atol=1e-4
    )
    target = map_target(scores, ids, boxes, side=2, num_classes=3, geometry="corrected")
    assert torch.equal(most_probable(target), expected.argmax(dim=2).flatten())


def test_several_grids_at_once_equal_each_alone() -> None:
    maps = published.random_maps(2, 3, 6, 6, 30, seed=18)
    how = {"num_classes": 30, "geometry": "corrected"}
    for side, target in zip((1, 4), map_targets(*maps, sides=(1, 4), **how), strict=True):
        alone = map_target(*maps, side=side, **how)
        assert torch.equal(published.dense(target, 30), published.dense(alone, 30))


@pytest.mark.parametrize("sign", [1, -1])
def test_ids_are_exact_with_logits_of_any_sign(sign: int) -> None:
    scores, ids, boxes = published.random_maps(2, 3, 6, 6, 12, seed=19)
    scores, large = sign * scores.abs(), ids * 2_000_000  # beyond 2^24
    few = map_target(scores, ids, boxes, side=3, num_classes=12, geometry="corrected")
    many = map_target(scores, large, boxes, side=3, num_classes=24_000_000, geometry="corrected")
    assert torch.equal(many.ids, few.ids * 2_000_000)


def cell_coded_maps(size: int) -> tuple[Tensor, Tensor]:
    """Return the map of one image whose only class in each cell is the number of the cell."""
    ids = torch.arange(size * size).reshape(1, 1, size, size)
    return torch.full((1, 1, size, size), 20.0), ids


@pytest.mark.parametrize(
    ("geometry", "first_row", "first_column"), [("corrected", 4, 1), ("reference", 1, 4)]
)
def test_geometry_decides_which_region_is_labelled(
    geometry: Geometry, first_row: int, first_column: int
) -> None:
    scores, ids = cell_coded_maps(8)
    boxes = torch.tensor([[4 / 8, 1 / 8, 3 / 8, 3 / 8]])  # rows 4 to 6, columns 1 to 3
    target = map_target(scores, ids, boxes, side=3, num_classes=64, geometry=geometry)
    named = most_probable(target)
    # A token's sample is on the corner of four cells; the softmax selects one of them.
    rows, columns = named.div(8, rounding_mode="floor"), named % 8
    expected_rows = first_row + torch.arange(3).repeat_interleave(3)
    expected_columns = first_column + torch.arange(3).repeat(3)
    assert ((rows == expected_rows) | (rows == expected_rows - 1)).all()
    assert ((columns == expected_columns) | (columns == expected_columns - 1)).all()


@pytest.mark.parametrize("num_classes", [4, 9])
def test_the_most_probable_class_is_the_first_maximum(num_classes: int) -> None:
    scores, ids, boxes = published.random_maps(40, 2, 3, 3, num_classes, seed=14)
    scores[:20] = -scores[
        :20
    ].abs()  # here a class without an entry is the most probable, or in a full row the least negative one
    target = map_target(scores, ids, boxes, side=2, num_classes=num_classes, geometry="corrected")
    # In single precision, so that equal probabilities are equal numbers.
    expected = published.dense(target, num_classes).float().argmax(dim=1)
    assert torch.equal(most_probable(target), expected)


@pytest.mark.parametrize("side", [1, 14])
def test_memory_does_not_depend_on_the_number_of_classes(side: int) -> None:
    scores, ids, boxes = published.random_maps(4, 5, 18, 18, 1000, seed=15)
    largest = []
    for num_classes in (1000, 21841):
        with LargestTensor() as recorder:
            map_target(scores, ids, boxes, side=side, num_classes=num_classes, geometry="corrected")
        largest.append(recorder.elements)
    window = 3 if side == 14 else 18
    assert largest == [4 * side * side * window * window * 5] * 2


@pytest.mark.parametrize("reach", [None, 1.0, 1.3333, 4.7])  # None: boxes inside the map
@pytest.mark.parametrize(("size", "side"), [(18, 14), (18, 24), (9, 14), (14, 1), (3, 2), (3, 8)])
def test_the_weights_of_windows_sum_to_one_and_are_on_the_map(
    size: int, side: int, reach: float | None
) -> None:
    generator = torch.Generator().manual_seed(21)
    largest = reach or 1.0
    extent = largest * (torch.rand(2000, generator=generator) * 0.95 + 0.05)
    start = torch.rand(2000, generator=generator)
    start = 3 * start - 1 if reach else start * (1 - extent)
    start[0], extent[0] = 0.0, largest
    cells, weights = roi_weights(start, extent, side=side, size=size, scale=size, reach=largest)
    assert cells.min() >= 0
    assert cells.max() < size
    # A box inside the map that is smaller than a cell is extended, possibly beyond the map.
    chosen = (start < 0) | (start + extent > 1) if reach else extent * size >= 1
    whole = weights.sum(dim=2)[chosen]
    torch.testing.assert_close(whole, torch.ones_like(whole))
