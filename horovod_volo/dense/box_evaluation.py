"""Exact metrics of detection: every image counts once, whatever the number of ranks.

Images are scaled to the network's square. Each rank finds boxes in its images; the boxes of all ranks are
gathered once, and rank 0 computes COCO's average precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Detection
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalBatches
from horovod_volo.data.pipeline import Normalization
from horovod_volo.dense.anchors import Anchors, detect
from horovod_volo.dense.average_precision import (
    NO_TRUTH,
    BoxMetrics,
    BoxPredictions,
    BoxTruths,
    measure_boxes,
)
from horovod_volo.dense.box_list import BoxList
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.engine.task import Beat, Metrics


class BoxPredictor:
    """Finds boxes in images."""

    def __init__(self, settings: Detection, anchors: Anchors, batch: int) -> None:
        """Images are always predicted `batch` together, so that a result does not depend on their number."""
        self._settings, self._anchors, self._batch = settings, anchors, batch

    def find(self, network: nn.Module, images: Tensor) -> list[BoxPredictions]:
        """Return the boxes of each image, as fractions of it, by descending score; images are numbered 0."""
        padded = F.pad(images, (0, 0, 0, 0, 0, 0, 0, self._batch - len(images)))
        settings = self._settings
        values, logits = network(padded)
        found = detect(
            values,
            logits,
            self._anchors,
            min_score=settings.min_score,
            max_overlap=settings.max_overlap,
            most=settings.most_boxes,
        )
        boxes, scores, classes = (each[: len(images)].cpu().numpy() for each in found)
        used = scores > 0
        return [
            BoxPredictions(np.zeros(row.sum(), dtype=np.int64), of_image[row], kinds[row] - 1, values[row])
            for of_image, values, kinds, row in zip(boxes, scores, classes, used, strict=True)
        ]


def build_eval_loader(
    images: BoxList,
    settings: Data,
    *,
    side: int,
    rank: int,
    size: int,
    device: torch.device,
    threads: int,
    normalization: Normalization,
) -> EvalBatches:
    """Build the loader of this rank's images, scaled to squares."""
    return EvalBatches(
        images,
        len(images),
        settings,
        image_size=side,
        resize=lambda sizes: np.full_like(sizes, side),
        rank=rank,
        size=size,
        device=device,
        threads=threads,
        normalization=normalization,
        interpolation="bilinear",
    )


class FoundBoxes(NamedTuple):
    """What was found in the images of all ranks, the same on every rank."""

    metrics: BoxMetrics
    predictions: BoxPredictions  # in pixels; images are positions in the list
    images: int
    bad_samples: int  # damaged ones, whose boxes are left out

    def as_metrics(self) -> Metrics:
        """Return average precision and recall in per cent, and the numbers of images.

        Those of a size that no true box has are left out.
        """
        values = self.metrics._asdict()
        values.pop("ap_of_classes")
        named = {name: 100 * value for name, value in values.items() if value != NO_TRUTH}
        return named | {"images": self.images, "bad_samples": self.bad_samples}


def find_in_all(
    network: nn.Module,
    loader: EvalBatches,
    images: BoxList,
    predictor: BoxPredictor,
    world: World,
    arithmetic: torch.autocast,
    on_image: Callable[[int, BoxPredictions], object],
) -> FoundBoxes:
    """Find boxes in the images of all ranks, and measure them. Collective: every rank calls this."""
    own: list[BoxPredictions] = []
    done: list[int] = []
    bad = 0
    with torch.inference_mode(), arithmetic:
        for pending, batch in loader.decoded():
            of_batch = predictor.find(network, batch)
            for index, damaged, found in zip(pending.indices.tolist(), pending.bad, of_batch, strict=True):
                if damaged:
                    bad += 1
                    continue
                in_pixels = _of_image(found, index, images.size(index))
                on_image(index, in_pixels)
                own.append(in_pixels)
                done.append(index)
    of_ranks = world.allgather_object((_joined(own), done, bad))
    usable = np.array([index for _, part, _ in of_ranks for index in part], dtype=np.int64)
    damaged_of_all = sum(part for *_, part in of_ranks)
    if len(np.unique(usable)) != len(usable) or len(usable) + damaged_of_all != len(images):
        raise RuntimeError(f"evaluation covered {len(usable) + damaged_of_all} images of {len(images)}")
    if not len(usable):
        raise UserError(f"none of the images in {images.files.images} can be read.")
    predictions = _joined([part for part, *_ in of_ranks])
    # Images ascend with COCO's ids; those of an image stay in their order.
    predictions = predictions.take(np.argsort(predictions.images, kind="stable"))
    measure = partial(measure_boxes, truths_of(images, usable), predictions, len(images.classes))
    return FoundBoxes(world.run_on_rank_zero(measure), predictions, len(usable), damaged_of_all)


def truths_of(images: BoxList, usable: NDArray[np.int64]) -> BoxTruths:
    """Return the true boxes of these images, crowds included."""
    arrays, usable = images.annotations.arrays, np.sort(usable)
    rows = [images.rows(index) for index in usable.tolist()]
    numbers = np.concatenate([np.arange(row.start, row.stop) for row in rows])
    counts = [row.stop - row.start for row in rows]
    return BoxTruths(
        np.repeat(usable, counts),
        arrays.boxes[numbers],
        arrays.classes[numbers],
        arrays.crowd[numbers],
        arrays.areas[numbers],
    )


def _of_image(found: BoxPredictions, index: int, size: tuple[int, int]) -> BoxPredictions:
    """Return boxes in the pixels of an image of this height and width."""
    height, width = size
    pixels = found.boxes.clip(0, 1) * np.array([width, height] * 2, dtype=np.float32)
    return found._replace(images=np.full_like(found.images, index), boxes=pixels)


def _joined(parts: list[BoxPredictions]) -> BoxPredictions:
    if not parts:
        empty: dict[str, Any] = {"images": np.int64, "classes": np.int64, "scores": np.float32}
        columns = {name: np.zeros(0, dtype=dtype) for name, dtype in empty.items()}
        return BoxPredictions(boxes=np.zeros((0, 4), dtype=np.float32), **columns)
    return BoxPredictions(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def measure_detections(
    network: nn.Module,
    beat: Beat,
    *,
    loader: EvalBatches,
    images: BoxList,
    predictor: BoxPredictor,
    world: World,
    arithmetic: torch.autocast,
    pictures: EvaluationPictures,
) -> Metrics:
    """Return a network's metrics on the held-out images. Collective: every rank calls this."""

    def on_image(index: int, found: BoxPredictions) -> None:
        if pictures.wants(index):
            pictures.add_boxes(images, index, found.boxes, found.classes, found.scores)
        beat(1)

    return find_in_all(network, loader, images, predictor, world, arithmetic, on_image).as_metrics()
