"""Anchors by hand, targets against loops and against DALI's box_encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from anchor_samples import OF_300, SMALL
from torch import Tensor

from horovod_volo.dense import anchors as anchors_module
from horovod_volo.dense.anchors import (
    SSD300,
    Anchors,
    anchor_rule,
    build_anchors,
    decode,
    encode,
)


def random_boxes(
    images: int, most: int, *, seed: int, fewest: int = 0, smallest: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Return boxes (images, most, 4) and classes 1 to 80 (images, most); 0 is padding, after the boxes."""
    random = torch.Generator().manual_seed(seed)
    size = smallest ** torch.rand(images, most, 2, generator=random)
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
        outputs = fn.box_encoder(
            *inputs,
            anchors=corners.flatten().tolist(),
            criteria=0.5,
            offset=True,
            stds=[0.1, 0.1, 0.2, 0.2],
        )
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
    torch.testing.assert_close(
        OF_300.corners[number], torch.cat([centre - half, centre + half]), rtol=0, atol=1e-7
    )


def test_encoded_values_by_hand() -> None:
    anchors = Anchors(torch.tensor([[0.5, 0.5, 0.2, 0.4]]), torch.tensor([[0.4, 0.3, 0.6, 0.7]]))
    targets = encode(torch.tensor([[[0.4, 0.3, 0.8, 0.5]]]), torch.tensor([[7]]), anchors)
    expected = [(0.6 - 0.5) / 0.2 * 10, (0.4 - 0.5) / 0.4 * 10, np.log(2) * 5, -np.log(2) * 5]
    assert targets.boxes.flatten().tolist() == pytest.approx(expected, abs=1e-5)
    assert targets.classes.tolist() == [[7]]  # the best anchor, although the IoU is a third


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


@pytest.mark.parametrize("most", [0, 3])
def test_images_without_boxes_are_all_background(most: int) -> None:
    targets = encode(torch.zeros(2, most, 4), torch.zeros(2, most, dtype=torch.int32), OF_300)
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


def test_targets_are_computed_without_a_synchronization() -> None:
    # Tensors on meta have no values, so reading one on the host, or a shape that depends on one, is an error.
    on_meta = Anchors(*(part.to("meta") for part in OF_300))
    boxes, classes = torch.empty(3, 9, 4, device="meta"), torch.empty(3, 9, device="meta", dtype=torch.int64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        boxes[classes > 0]
    targets = encode(boxes, classes, on_meta)
    assert targets.classes.shape == (3, 8732)
    assert decode(targets.boxes, on_meta).shape == (3, 8732, 4)
