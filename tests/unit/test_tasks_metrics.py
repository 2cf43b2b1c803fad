"""COCO's average precision against pycocotools, mean IoU against loops over pixels; pictures stay small."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_samples import annotation, image, write_coco
from numpy.typing import NDArray
from PIL import Image
from pycocotools import coco, cocoeval
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import IGNORED, Labels, TrainBatch
from horovod_volo.dense.average_precision import BoxPredictions, BoxTruths, measure_boxes
from horovod_volo.dense.box_list import list_boxes
from horovod_volo.dense.mean_iou import count_pixels, iou_metrics, slide
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.models.weights_header import statistics_of_run
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import NO_BOX
from horovod_volo.pictures.classification import draw_batch

RandomBoxes = tuple[BoxTruths, BoxPredictions, int]


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
    own_areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    areas = np.where(rng.random(count) < 0.3, rng.choice([1024, 9216, 1e5], count), own_areas * 0.7)
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
        by_name, ap_of_classes = measure_boxes(*boxes)
        expected = reference_metrics(*boxes)
        truths, predictions, _ = boxes
        narrow = predictions._replace(
            images=predictions.images.astype(np.int32),
            boxes=predictions.boxes.astype(np.float32),
            classes=predictions.classes.astype(np.uint8),
        )
        again = measure_boxes(truths._replace(classes=truths.classes.astype(np.int16)), narrow, boxes[2])
        assert again[0] == by_name
        np.testing.assert_allclose(
            [*by_name.values(), *ap_of_classes], expected, rtol=0, atol=1e-9, err_msg=f"{seed}"
        )


def test_metrics_equal_those_of_loops_over_pixels() -> None:
    random = np.random.default_rng(0)
    classes, confusion = 6, torch.zeros(6, 6, dtype=torch.int64)
    pairs = []
    for size in ((5, 7), (16, 3), (1, 1)):
        truth = random.integers(0, 4, size, dtype=np.uint8)  # the classes 4 and 5 are nowhere in the masks
        predicted = np.where(random.random(size) < 0.6, truth, random.integers(0, 5, size))
        truth[random.random(size) < 0.2] = IGNORED
        confusion += count_pixels(torch.from_numpy(truth), torch.from_numpy(predicted), classes)
        pairs += list(zip(truth.ravel().tolist(), predicted.ravel().tolist(), strict=True))
    pairs = [pair for pair in pairs if pair[0] != IGNORED]
    ious, accuracies = [], []
    for label in range(classes):
        both = sum(pair == (label, label) for pair in pairs)
        either = sum(label in pair for pair in pairs)
        there = sum(pair[0] == label for pair in pairs)
        if either:
            ious.append(both / either)
        if there:
            accuracies.append(both / there)
    found = iou_metrics(confusion.numpy())
    assert len(ious) == 5
    assert found["miou"] == pytest.approx(100 * sum(ious) / len(ious), abs=1e-9)
    assert found["class_accuracy"] == pytest.approx(100 * sum(accuracies) / len(accuracies), abs=1e-9)
    right = sum(truth == predicted for truth, predicted in pairs)
    assert found["pixel_accuracy"] == pytest.approx(100 * right / len(pairs), abs=1e-9)


@pytest.mark.parametrize("batch", [1, 4, 50])
@pytest.mark.parametrize(
    ("size", "windows"), [((8, 8), 1), ((6, 5), 1), ((9, 8), 2), ((20, 13), 6), ((8, 40), 7)]
)
def test_every_pixel_has_the_mean_over_its_windows(size: tuple[int, int], windows: int, batch: int) -> None:
    """Each window's logits are its first pixel, which no other has; windows at the edge lie inside."""
    batches: list[int] = []

    def predict(images: Tensor) -> Tensor:
        batches.append(len(images))
        return images[:, :2, :1, :1].expand(-1, 2, *images.shape[2:])

    window, stride = 8, 6
    image = torch.arange(1.0, size[0] * size[1] + 1).view(1, 1, *size).expand(-1, 3, -1, -1)
    found = slide(predict, image, window, stride, batch)
    assert (sum(batches), max(batches)) == (windows, min(windows, batch))
    expected, counts = np.zeros(size), np.zeros(size)
    begins = [
        [max(0, min(step, side - window)) for step in range(0, max(side - window, 0) + stride, stride)]
        for side in size
    ]
    for top in dict.fromkeys(begins[0]):
        for left in dict.fromkeys(begins[1]):
            expected[top : top + window, left : left + window] += float(image[0, 0, top, left])
            counts[top : top + window, left : left + window] += 1
    assert found.shape == (1, 2, *size)
    assert np.allclose(found[0, 1].numpy(), expected / counts)


@pytest.mark.parametrize(("width", "height"), [(3000, 1), (1, 3000)])
def test_pictures_of_lines(tmp_path: Path, width: int, height: int) -> None:
    write_coco(tmp_path, [image(7, width, height)], [annotation(7, (0, 0, width, height))])
    boxes = EvaluationPictures(1)
    images = list_boxes(tmp_path, "train")
    boxes.add_boxes(images, 0, BoxPredictions(*(np.zeros(0),) * 4))
    masks = EvaluationPictures(1)
    mask = torch.zeros(height, width, dtype=torch.uint8)
    masks.add_masks(0, mask.expand(3, -1, -1), mask, mask)
    for picture in (*boxes.latest.values(), *masks.latest.values()):
        assert picture.height <= 256
        assert picture.width <= 3 * 3000


@pytest.mark.parametrize("data", [Data(), Data(mean=(0.2, 0.3, 0.4), std=(0.5, 0.4, 0.3))])
def test_pictures_of_a_training_batch_have_the_colours_of_its_images(data: Data) -> None:
    config, color = Config(data=data), torch.tensor([200, 120, 40])
    mean, std = (torch.tensor(values) for values in statistics_of_run(data, config.model.model))
    images = ((color / 255 - mean) / std).view(1, 3, 1, 1).repeat(2, 1, 32, 32)
    batch = TrainBatch(images, Labels(torch.arange(2)), np.arange(2), np.arange(2))
    loss = build_loss(config.objective, 2, 4)
    shown = Image.open(BytesIO(draw_batch(batch, NO_BOX, loss, ("ant", "bee"), config)["batch"].png))
    assert np.abs(np.array(shown.convert("RGB").getpixel((60, 60))) - color.numpy()).max() <= 2
