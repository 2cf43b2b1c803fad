"""COCO's average precision against pycocotools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools import coco, cocoeval

from horovod_volo.dense.average_precision import (
    BoxPredictions,
    BoxTruths,
    measure_boxes,
)

RandomBoxes = tuple[BoxTruths, BoxPredictions, int]


def box_areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    sides = boxes[:, 2:] - boxes[:, :2]
    return sides[:, 0] * sides[:, 1]


def random_boxes(seed: int) -> RandomBoxes:
    """Draw truths, some of them crowds, predictions near and far from them, and the number of classes.

    Coordinates and scores are coarse, so that scores are equal and IoUs equal each other and thresholds. Some
    images have no boxes; some classes have no truths.
    """
    rng = np.random.default_rng(seed)
    images, num_classes = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    extent, unit = (12, 60, 300)[seed % 3], (1.0, 0.25)[seed % 2]

    def draw_boxes(count: int) -> NDArray[np.float64]:
        low = rng.integers(0, extent, (count, 2))
        return np.concatenate([low, low + rng.integers(0, extent, (count, 2))], axis=1) * 1.0

    count = int(rng.integers(0, 40))
    boxes = draw_boxes(count)
    areas = np.where(rng.random(count) < 0.3, rng.choice([1024, 9216, 1e5], count), box_areas(boxes) * 0.7)
    truths = BoxTruths(
        images=rng.integers(0, images, count),
        boxes=boxes,
        classes=rng.integers(0, num_classes, count),
        crowd=rng.random(count) < 0.2,
        areas=areas,
    )
    copies = rng.integers(0, count, int(rng.integers(0, 4 * count))) if count else np.empty(0, np.int64)
    near = boxes[copies] + unit * rng.integers(-3, 4, (len(copies), 4))
    near[:, 2:] = np.maximum(near[:, 2:], near[:, :2])
    far = draw_boxes(int(rng.integers(0, (60, 600)[seed % 10 == 0])))
    order = rng.permutation(len(near) + len(far))
    predictions = BoxPredictions(
        images=np.append(truths.images[copies], rng.integers(0, images, len(far)))[order],
        boxes=np.concatenate([near, far])[order],
        classes=np.append(truths.classes[copies], rng.integers(0, num_classes, len(far)))[order],
        scores=rng.integers(1, (20, 10**6)[seed % 7 < 3], len(order)) / 10**6,
    )
    return truths, predictions, num_classes


def reference_metrics(truths: BoxTruths, predictions: BoxPredictions, num_classes: int) -> list[float]:
    """Return the twelve metrics and those per class of pycocotools."""
    images = sorted({*truths.images.tolist(), *predictions.images.tolist()})
    common = {
        "info": {},
        "images": [{"id": image} for image in images],
        "categories": [{"id": number} for number in range(num_classes)],
    }

    def annotations(boxes: BoxTruths | BoxPredictions) -> list[dict[str, Any]]:
        sizes = boxes.boxes[:, 2:] - boxes.boxes[:, :2]
        rows = zip(boxes.images, boxes.classes, np.append(boxes.boxes[:, :2], sizes, axis=1), strict=True)
        return [
            {"image_id": int(image), "category_id": int(number), "bbox": box.tolist()}
            for image, number, box in rows
        ]

    def indexed(rows: list[dict[str, Any]]) -> Any:
        data = coco.COCO()
        data.dataset = {**common, "annotations": rows}
        data.createIndex()
        return data

    true_rows, predicted_rows = annotations(truths), annotations(predictions)
    for number, row in enumerate(true_rows):
        row |= {"id": number + 1, "area": float(truths.areas[number]), "iscrowd": int(truths.crowd[number])}
    for row, score in zip(predicted_rows, predictions.scores.tolist(), strict=True):
        row["score"] = score
    truth_index = indexed(true_rows)
    prediction_index = truth_index.loadRes(predicted_rows) if predicted_rows else indexed([])
    evaluation = cocoeval.COCOeval(truth_index, prediction_index, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # (thresholds, recalls, classes)
    return [*evaluation.stats.tolist(), *precision.mean((0, 1)).tolist()]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_all_metrics_equal_those_of_pycocotools(first: int) -> None:
    for seed in range(first, first + 50):
        boxes = random_boxes(seed)
        if not len(boxes[0].images) + len(boxes[1].images):
            continue  # pycocotools needs an image
        metrics = measure_boxes(*boxes)
        expected = reference_metrics(*boxes)
        truths, predictions, _ = boxes
        narrow = predictions._replace(
            images=predictions.images.astype(np.int32),
            boxes=predictions.boxes.astype(np.float32),
            classes=predictions.classes.astype(np.uint8),
        )
        again = measure_boxes(truths._replace(classes=truths.classes.astype(np.int16)), narrow, boxes[2])
        assert again[:12] == metrics[:12]
        np.testing.assert_allclose(
            [*metrics[:12], *metrics.ap_of_classes], expected, rtol=0, atol=1e-9, err_msg=f"{seed}"
        )
