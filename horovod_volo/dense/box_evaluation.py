"""Exact metrics of detection: every image counts once, whatever the number of ranks.

Images are scaled to the network's square. Each rank finds boxes in its images; the boxes of all ranks are
gathered once, and rank 0 computes COCO's average precision.
"""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalBatches
from horovod_volo.dense.anchors import (
    Anchors,
    anchor_rule,
    build_anchors,
    decode,
    intersection_over_union,
    rows_together,
)
from horovod_volo.dense.average_precision import NO_TRUTH, BoxPredictions, BoxTruths, evaluator, measure_boxes
from horovod_volo.dense.box_list import BoxList
from horovod_volo.dense.dense_batches import RankContext
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.task import Evaluation, Measured
from horovod_volo.engine.task import Beat, Metrics

# As in SSD's reference: the score above which a box is found, the IoU with a better one of its class above
# which it is dropped, and how many are found in an image, at most.
_LEAST_SCORE, _MAX_OVERLAP, MOST_BOXES = 0.05, 0.5, 200

_NONE = BoxPredictions(
    np.zeros(0, np.int64), np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32)
)


class BoxEvaluation(Evaluation):
    """Finds boxes in the images of a list, scaled to squares."""

    def __init__(self, images: BoxList, context: RankContext) -> None:
        side = context.config.model.img_size
        context.world.run_on_all_ranks(evaluator)  # now, not after the images
        self._context, self._images = context, images
        self._anchors = build_anchors(anchor_rule(side), context.device)
        self._loader = EvalBatches(
            images,
            len(images),
            context.config.data,
            image_size=side,
            resize=lambda sizes: np.full_like(sizes, side),
            rank=context.world.rank,
            size=context.world.size,
            device=context.device,
            threads=context.threads,
            normalization=context.normalization,
            interpolation="bilinear",
        )
        self.bad_samples, self.folder = self._loader.bad_samples, images.files.images

    def measure(self, network: nn.Module, beat: Beat, pictures: EvaluationPictures | None = None) -> Measured:
        """Find boxes in the images of all ranks, and measure them. Collective: every rank calls this."""
        images, world = self._images, self._context.world
        own, done, bad = list[BoxPredictions](), list[int](), 0
        with torch.inference_mode(), self._context.autocast:
            for pending, batch in self._loader.decoded():
                indices = pending.indices.tolist()
                of_batch = self._find(network, batch, indices)
                bad += int(pending.bad.sum())
                for index, damaged, found in zip(indices, pending.bad, of_batch, strict=True):
                    if damaged:
                        continue
                    if pictures and pictures.wants(index):
                        pictures.add_boxes(images, index, found)
                    own.append(found)
                    done.append(index)
                    beat(1)
        of_ranks = world.allgather_object((_joined(own), done, bad))
        usable = np.array([index for _, part, _ in of_ranks for index in part], dtype=np.int64)
        bad_of_all = sum(part for *_, part in of_ranks)
        if len(np.unique(usable)) != len(usable) or len(usable) + bad_of_all != len(images):
            raise RuntimeError(f"evaluation covered {len(usable) + bad_of_all} images of {len(images)}")
        if not len(usable):
            raise UserError(f"none of the images in {images.files.images} can be read.")
        found_in_all = _joined([part for part, *_ in of_ranks])
        # Images ascend with COCO's ids; those of an image stay in their order.
        order = np.argsort(found_in_all.images, kind="stable")
        found_in_all = BoxPredictions._make(column[order] for column in found_in_all)
        if self.predictions:
            path = self.predictions / f"detections_{images.files.split}.json"
            world.run_on_rank_zero(partial(write_detections, path, images, found_in_all))
        measure = partial(measure_boxes, truths_of(images, usable), found_in_all, len(images.classes))
        values, ap_of_classes = world.run_on_rank_zero(measure)
        of_classes = zip(images.classes, ap_of_classes.tolist(), strict=True)
        # Sizes that no true box has are left out.
        metrics = {name: 100 * value for name, value in values.items() if value != NO_TRUTH}
        return Measured(
            metrics | {"images": len(usable), "bad_samples": bad_of_all},
            {name: 100 * value for name, value in of_classes if value != NO_TRUTH},
        )

    def _find(self, network: nn.Module, images: Tensor, indices: list[int]) -> list[BoxPredictions]:
        """Return the boxes that are found in each image, in its pixels, by descending score."""
        # Always as many images together, so that a result does not depend on their number.
        padded = F.pad(images, (0, 0, 0, 0, 0, 0, 0, self._loader.batch_size - len(images)))
        values, logits = network(padded)
        found = detect(values, logits, self._anchors)
        parts = (each[: len(images)].cpu().numpy() for each in found)
        of_images = []
        for index, boxes, scores, classes in zip(indices, *parts, strict=True):
            used, (height, width) = scores > 0, self._images.size(index)
            pixels = boxes[used].clip(0, 1) * np.array([width, height] * 2, dtype=np.float32)
            numbers = np.full(len(pixels), index, dtype=np.int64)
            of_images.append(BoxPredictions(numbers, pixels, classes[used] - 1, scores[used]))
        return of_images

    def rows(self, metrics: Metrics) -> list[tuple[str, str]]:
        sizes = [size for size in ("small", "medium", "large") if f"ap_{size}" in metrics]
        return [
            ("AP", f"{metrics['ap']:.3f} %, the mean over IoU 0.50 to 0.95"),
            ("AP50 AP75", f"{metrics['ap50']:.3f} %, {metrics['ap75']:.3f} %"),
            ("by size", ", ".join(f"{size} {metrics[f'ap_{size}']:.3f} %" for size in sizes)),
            ("AR100", f"{metrics['ar100']:.3f} %"),
        ]


def truths_of(images: BoxList, usable: NDArray[np.int64]) -> BoxTruths:
    """Return the true boxes of these images, crowds included."""
    truths, usable = images.annotations, np.sort(usable)
    rows = [images.rows(index) for index in usable.tolist()]
    numbers = np.concatenate([np.arange(row.start, row.stop) for row in rows])
    counts = [row.stop - row.start for row in rows]
    columns = (truths.boxes, truths.classes, truths.crowd, truths.areas)
    return BoxTruths(np.repeat(usable, counts), *(column[numbers] for column in columns))


def _joined(parts: list[BoxPredictions]) -> BoxPredictions:
    return BoxPredictions(*(np.concatenate(column) for column in zip(_NONE, *parts, strict=True)))


def write_detections(path: Path, images: BoxList, found: BoxPredictions) -> None:
    """Write boxes in the form of COCO's results."""
    ids, categories = images.annotations.image_ids[images.numbers], images.annotations.category_ids
    sides = found.boxes.astype(float)
    sides[:, 2:] -= sides[:, :2]
    columns = (ids[found.images].tolist(), found.classes.tolist(), sides.tolist(), found.scores.tolist())
    records = [
        {"image_id": image, "category_id": categories[kind], "bbox": box, "score": score}
        for image, kind, box, score in zip(*columns, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(records).encode())


class Detections(NamedTuple):
    """Boxes found in a batch, by descending score; unused entries, all 0, follow."""

    boxes: Tensor  # (batch, most, 4) fp32
    scores: Tensor  # (batch, most) fp32
    classes: Tensor  # (batch, most) int64


@torch.no_grad()
def detect(values: Tensor, logits: Tensor, anchors: Anchors, most: int = MOST_BOXES) -> Detections:
    """Return the detections that a network's outputs (batch, anchors, 4 and classes + 1) mean.

    Of each class the `most` best boxes go through non-maximum suppression; of what is left, the `most` best
    of an image are kept. Synchronizes with the device.
    """
    boxes = decode(values, anchors)
    scores = logits.float().softmax(dim=2)[..., 1:].transpose(1, 2)  # (batch, classes, anchors)
    num_classes, candidates = scores.shape[1], min(most, scores.shape[2])
    scores = scores.where(scores > _LEAST_SCORE, 0.0)
    scores, numbers = scores.topk(candidates, dim=2)  # (batch, classes, candidates)
    of_candidate = boxes.unsqueeze(1).expand(-1, num_classes, -1, -1)
    of_candidate = of_candidate.gather(2, numbers.unsqueeze(3).expand(-1, -1, -1, 4))
    kept = _kept(of_candidate.flatten(0, 1), scores.flatten(0, 1) > 0).view_as(scores)
    scores = scores.where(kept, 0.0).flatten(1)
    scores, numbers = scores.topk(min(most, scores.shape[1]), dim=1)  # (batch, most)
    used = scores > 0
    of_candidate = of_candidate.flatten(1, 2).gather(1, numbers.unsqueeze(2).expand(-1, -1, 4))
    return Detections(
        of_candidate.where(used.unsqueeze(2), 0.0),
        scores,
        torch.where(used, numbers.div(candidates, rounding_mode="floor") + 1, 0),
    )


def _kept(boxes: Tensor, present: Tensor) -> Tensor:
    """Return which boxes (rows, candidates, 4) of each row stay; rows without a present box cost nothing."""
    kept = torch.zeros_like(present)
    rows = present.any(dim=1).nonzero().squeeze(1)
    for block in torch.split(rows, rows_together(boxes.shape[1] ** 2, boxes.device)):
        kept[block] = suppress_overlaps(boxes[block], present[block], _MAX_OVERLAP)
    return kept


def suppress_overlaps(boxes: Tensor, present: Tensor, max_overlap: float) -> Tensor:
    """Return which boxes (rows, candidates, 4), sorted by descending score, greedy suppression keeps.

    A box is kept if it is present and its IoU with every kept box before it is at most `max_overlap`. After n
    rounds this holds for the first n boxes of a row; most rows need few rounds. Synchronizes in each.
    """
    excludes = (intersection_over_union(boxes, boxes) > max_overlap).triu(diagonal=1)
    kept = present
    while True:
        excluded = (excludes & kept.unsqueeze(2)).any(dim=1)
        following = present & ~excluded
        if torch.equal(following, kept):
            return kept
        kept = following
