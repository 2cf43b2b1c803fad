"""Anchors by hand, targets against DALI's box_encoder, SSD's loss and its detections against loops."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from horovod_volo.dense import anchors as anchors_module
from horovod_volo.dense.anchors import (
    SSD300,
    AnchorRule,
    Anchors,
    BoxTargets,
    anchor_rule,
    build_anchors,
    decode,
    detection_loss,
    encode,
    intersection_over_union,
)
from horovod_volo.dense.box_evaluation import detect, suppress_overlaps

OF_300 = build_anchors(SSD300)
# Few anchors, for loops in Python: 4 x 25 + 6 x 9 + 4.
SMALL = build_anchors(
    AnchorRule(
        image_size=100,
        sides=(5, 3, 1),
        steps=(20.0, 34.0, 100.0),
        sizes=(16.0, 33.0, 60.0, 95.0),
        ratios=((2.0,), (2.0, 3.0), (2.0,)),
    )
)


def iou_of(first: Any, second: Any) -> Any:
    """Return the IoU of two boxes of four numpy scalars."""
    width = max(min(first[2], second[2]) - max(first[0], second[0]), np.float32(0))
    height = max(min(first[3], second[3]) - max(first[1], second[1]), np.float32(0))
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in (first, second)]
    return width * height / (areas[0] + areas[1] - width * height)


def random_boxes(images: int, most: int, *, seed: int, fewest: int = 0) -> tuple[Tensor, Tensor]:
    """Return boxes (images, most, 4) and classes 1 to 80 (images, most); 0 is padding, after the boxes."""
    random = torch.Generator().manual_seed(seed)
    size = 0.01 ** torch.rand(images, most, 2, generator=random)
    start = torch.rand(images, most, 2, generator=random) * (1 - size)
    classes = torch.randint(1, 81, (images, most), generator=random)
    counts = torch.randint(fewest, most + 1, (images, 1), generator=random)
    present = torch.arange(most) < counts
    boxes = torch.cat([start, start + size], dim=2).clamp(0, 1)
    return boxes * present.unsqueeze(2), classes * present


def encoded_by_dali(boxes: Tensor, classes: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return DALI's classes (images, anchors) and encoded boxes (images, anchors, 4)."""
    import nvidia.dali.fn as fn
    import nvidia.dali.types
    from nvidia.dali import Pipeline

    ragged = [(of_image[real > 0], real[real > 0]) for of_image, real in zip(boxes, classes, strict=True)]
    batch = [[of_image.numpy() for of_image, _ in ragged], [real.int().numpy() for _, real in ragged]]
    pipeline = Pipeline(batch_size=len(boxes), num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        inputs = fn.external_source(
            source=lambda: batch,
            num_outputs=2,
            dtype=[nvidia.dali.types.FLOAT, nvidia.dali.types.INT32],
            ndim=[2, 1],
        )
        # With `offset`, a box is the difference of the centres over the anchor's size and the logarithm of
        # the ratio of the sizes, divided by `stds`; background is 0.
        encoding = {"criteria": 0.5, "offset": True, "stds": [0.1, 0.1, 0.2, 0.2]}
        outputs = fn.box_encoder(*inputs, anchors=corners.flatten().tolist(), **encoding)
        pipeline.set_outputs(*outputs)
    pipeline.build()
    encoded, labels = (torch.from_numpy(np.array(output.as_array())) for output in pipeline.run())
    return labels.long(), encoded


def test_the_rules_are_those_of_ssd300_and_ssd512() -> None:
    maps = list(zip(SSD300.sides, SSD300.anchors_per_position, strict=True))
    assert maps == [(38, 4), (19, 6), (10, 6), (5, 6), (3, 4), (1, 4)]
    assert OF_300.centres.shape == OF_300.corners.shape == (8732, 4)
    outside = (OF_300.corners < 0) | (OF_300.corners > 1)
    assert outside.any(dim=1).sum() == 2221
    assert 0 < OF_300.centres.min() < OF_300.centres.max() == 1
    rule = anchor_rule(512)
    assert rule.sides == (64, 32, 16, 8, 4, 2, 1)
    assert rule.anchors_per_position == (4, 6, 6, 6, 6, 4, 4)
    assert [size / 512 for size in rule.sizes] == pytest.approx([0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.05])
    assert len(build_anchors(rule).centres) == 24_564
    assert anchor_rule(128).sides == (16, 8, 4, 2, 1)


@pytest.mark.parametrize(
    ("number", "pixels"),
    [
        (0, (4, 4, 21, 21)),
        (1, (12, 4, 21, 21)),  # the next column
        (37, (300, 4, 21, 21)),
        (38, (4, 12, 21, 21)),  # the next row
        (1444, (4, 4, 945**0.5, 945**0.5)),  # the next shape: sqrt(21 x 45)
        (2 * 1444, (4, 4, 21 * 2**0.5, 21 / 2**0.5)),
        (3 * 1444, (4, 4, 21 / 2**0.5, 21 * 2**0.5)),
        (5776, (8, 8, 45, 45)),  # the next map
        (5776 + 4 * 361 + 20, (24, 24, 45 * 3**0.5, 45 / 3**0.5)),
        (5776 + 5 * 361, (8, 8, 45 / 3**0.5, 45 * 3**0.5)),
        (8728, (150, 150, 261, 261)),
        (8729, (150, 150, (261 * 315) ** 0.5, (261 * 315) ** 0.5)),
        (8731, (150, 150, 261 / 2**0.5, 300)),  # 261 x sqrt(2), limited to the image
    ],
)
def test_anchors_by_hand(number: int, pixels: tuple[float, ...]) -> None:
    expected = torch.tensor(pixels) / 300
    torch.testing.assert_close(OF_300.centres[number], expected, rtol=0, atol=1e-7)
    centre, half = expected[:2], expected[2:] / 2
    corners = torch.cat([centre - half, centre + half])
    torch.testing.assert_close(OF_300.corners[number], corners, rtol=0, atol=1e-7)


def test_targets_equal_those_of_dali() -> None:
    boxes, classes = random_boxes(200, 12, seed=3)
    targets = encode(boxes, classes, OF_300)
    theirs, of_theirs = encoded_by_dali(boxes, classes, OF_300.corners)
    assert theirs.count_nonzero() > 2000
    # Equally good anchors, as several around a tiny box, are no exception: the last is taken here too.
    assert torch.equal(targets.classes, theirs)
    torch.testing.assert_close(targets.boxes, of_theirs, rtol=0, atol=1e-4)


def test_padding_has_no_influence_wherever_it_is() -> None:
    boxes, classes = random_boxes(6, 4, seed=4, fewest=2)
    expected = encode(boxes, classes, OF_300)
    unused = torch.tensor([float("nan"), -1.0, 2.0, 0.5])
    apart = torch.stack([boxes, unused.expand_as(boxes)], dim=2).flatten(1, 2)
    among = torch.stack([classes, torch.zeros_like(classes)], dim=2).flatten(1)
    for actual, wanted in zip(encode(apart, among, OF_300), expected, strict=True):
        assert torch.equal(actual, wanted)
    # Nor has a box without area, the logarithm of whose size is infinite.
    flat = torch.tensor([[[0.2, 0.2, 0.2, 0.6], [0.1, 0.5, 0.4, 0.5], [0.6, 0.6, 0.9, 0.9]]])
    targets = encode(flat, torch.tensor([[1, 2, 3]]), OF_300)
    assert targets.classes.unique().tolist() == [0, 3]
    assert targets.boxes.isfinite().all()


def test_images_without_boxes_are_all_background() -> None:
    """Also without padding: of a batch in which no image has a box."""
    targets = encode(torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.int32), OF_300)
    assert targets.classes.shape == (2, 8732)
    assert targets.boxes.shape == (2, 8732, 4)
    assert not targets.classes.any()
    assert not targets.boxes.any()


def test_blocks_of_images_do_not_change_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, classes = random_boxes(5, 4, seed=5)
    expected = encode(boxes, classes, SMALL)
    monkeypatch.setattr(anchors_module, "_BLOCK_ON_CPU", 2 * 4 * len(SMALL.corners))
    for actual, wanted in zip(encode(boxes, classes, SMALL), expected, strict=True):
        assert torch.equal(actual, wanted)


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
    assert values.grad.dtype == dtype
    extreme = (logits.detach().sign() * 6e4).half().requires_grad_()
    loss = detection_loss(values, extreme, targets)
    loss.total.backward()
    assert loss.total.isfinite()
    assert extreme.grad.isfinite().all()


def test_targets_and_loss_are_computed_without_a_synchronization() -> None:
    # Tensors on meta have no values, so reading one on the host, or a shape that depends on one, is an error.
    on_meta = Anchors(*(part.to("meta") for part in OF_300))
    boxes, classes = torch.empty(3, 9, 4, device="meta"), torch.empty(3, 9, device="meta", dtype=torch.int64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        boxes[classes > 0]
    targets = encode(boxes, classes, on_meta)
    assert targets.classes.shape == (3, 8732)
    assert decode(targets.boxes, on_meta).shape == (3, 8732, 4)
    values, logits = (outputs.to("meta").requires_grad_() for outputs in random_outputs(2, seed=12))
    detection_loss(values, logits, BoxTargets(*(each.to("meta") for each in random_targets([1, 2], seed=13))))


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
    others = torch.cat([point, torch.tensor([[0.0, 0, 1, 1]])])
    assert intersection_over_union(point, others).tolist() == [[0, 0]]
