"""Detections against a loop over classes and boxes, and what non-maximum suppression keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from anchor_samples import OF_300, SMALL, iou_of
from torch import Tensor

from horovod_volo.dense.anchors import decode, encode, intersection_over_union
from horovod_volo.dense.box_evaluation import detect, suppress_overlaps


def detected_by_loops(values: Tensor, logits: Tensor, most: int) -> list[tuple[float, int, list[float]]]:
    """Return score, class and box of the detections of one image, by descending score."""
    boxes, found = decode(values, SMALL), []
    for number, scores in enumerate(logits.softmax(dim=1).T[1:], start=1):
        above = [int(anchor) for anchor in scores.argsort(descending=True) if scores[anchor] > 0.05][:most]
        kept: list[int] = []
        for anchor in above:
            if all(iou_of(boxes[anchor].numpy(), boxes[other].numpy()) <= 0.5 for other in kept):
                kept.append(anchor)
        found += [(float(scores[anchor]), number, boxes[anchor].tolist()) for anchor in kept]
    return sorted(found, reverse=True)[:most]


@pytest.mark.parametrize("most", [1000, 200, 7])
def test_detections_equal_a_loop(most: int) -> None:
    random = torch.Generator().manual_seed(6)
    values = torch.randn(3, len(SMALL.corners), 4, generator=random)
    logits = 2 * torch.randn(3, len(SMALL.corners), 5, generator=random)
    logits[1, :, 0] += 12  # in the second image almost nothing is above the score
    found = detect(values, logits, SMALL, most)
    for image, (boxes, scores, classes) in enumerate(zip(*found, strict=True)):
        expected = detected_by_loops(values[image], logits[image], most)
        assert scores.count_nonzero() == len(expected)
        assert (len(expected) == most) == (most < 1000 and image != 1)
        for score, number, box, wanted in zip(scores, classes, boxes, expected, strict=False):
            assert float(score) == pytest.approx(wanted[0], abs=1e-6)
            assert int(number) == wanted[1]
            assert box.tolist() == pytest.approx(wanted[2], abs=1e-6)
        assert not boxes[len(expected) :].any()
        assert not classes[len(expected) :].any()


def test_a_perfect_network_detects_the_boxes() -> None:
    boxes = torch.tensor([[[0.1, 0.1, 0.4, 0.5], [0.5, 0.5, 0.9, 0.8]], [[0.2, 0.3, 0.7, 0.9], [0, 0, 0, 0]]])
    classes = torch.tensor([[3, 80], [80, 0]])
    targets = encode(boxes, classes, OF_300)
    logits = 20.0 * F.one_hot(targets.classes, 81)
    found = detect(targets.boxes.half().float(), logits, OF_300)
    assert found.boxes.shape == (2, 200, 4)
    assert (found.scores > 0).sum(dim=1).tolist() == [2, 1]
    for image, number in itertools.product(range(2), range(2)):
        if classes[image, number]:
            place = found.classes[image].tolist().index(int(classes[image, number]))
            torch.testing.assert_close(found.boxes[image, place], boxes[image, number], rtol=0, atol=1e-3)


def test_a_suppressed_box_suppresses_nothing() -> None:
    chain = torch.tensor([[[0.0, 0, 1, 1], [0.3, 0, 1.3, 1], [0.6, 0, 1.6, 1], [0.9, 0, 1.9, 1]]])
    present = torch.ones(1, 4, dtype=torch.bool)
    assert suppress_overlaps(chain, present, 0.5).tolist() == [[True, False, True, False]]
    present[0, 0] = False
    assert suppress_overlaps(chain, present, 0.5).tolist() == [[False, True, False, True]]


def test_the_iou_of_boxes_without_area_is_zero() -> None:
    point = torch.tensor([[0.5, 0.5, 0.5, 0.5]])
    assert intersection_over_union(point, torch.cat([point, torch.tensor([[0.0, 0, 1, 1]])])).tolist() == [
        [0, 0]
    ]
