"""Evaluates a trained detector on one rank or many, and writes what it finds."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import World
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.data.boxes.box_list import BoxList, find_boxes, list_boxes
from horovod_volo.data.image_decoder import decoder_messages
from horovod_volo.evaluation.dense import (
    CountedProgress,
    DenseRequest,
    Progress,
    lines_of,
    open_network,
    settings_of,
    worst_lines,
)
from horovod_volo.models.precision import autocast
from horovod_volo.objective.anchors import anchor_rule, build_anchors
from horovod_volo.tasks.average_precision import NO_TRUTH, BoxPredictions
from horovod_volo.tasks.box_evaluation import BoxPredictor, FoundBoxes, build_eval_loader, find_in_all


@dataclass(frozen=True)
class EvaluatedBoxes:
    """The result of an evaluation, the same on every rank."""

    model: str
    classes: tuple[str, ...]
    data: str  # the folder of the images
    found: FoundBoxes
    messages: list[str]  # on the weights and the decoder
    bad_samples: list[str]  # one message for each damaged image


def measure_found(request: DenseRequest, world: World, progress: Progress) -> EvaluatedBoxes:
    """Evaluate a detector on every image once. Collective: every rank calls this."""
    config = world.run_on_all_ranks(partial(settings_of, request))
    decoder = world.run_on_all_ranks(partial(decoder_messages, request.image_decoder))
    images = world.run_on_rank_zero(partial(_list, request))
    trained = open_network(request, config, images, world)
    loader = build_eval_loader(
        images,
        trained.settings,
        side=config.model.img_size,
        rank=world.rank,
        size=world.size,
        device=trained.device,
        threads=trained.threads,
        normalization=trained.normalization,
    )
    anchors = build_anchors(anchor_rule(config.model.img_size), trained.device)
    counter = CountedProgress(progress, world, len(images))
    with closing(loader):
        found = find_in_all(
            trained.network,
            loader,
            images,
            BoxPredictor(config.detection, anchors, loader.batch_size),
            world,
            autocast(request.precision, trained.device),
            lambda *_: counter.one(),
        )
    if request.predictions:
        path = Path(request.predictions) / f"detections_{request.split}.json"
        world.run_on_rank_zero(partial(write_detections, path, images, found.predictions))
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    folder, classes = str(images.files.images), tuple(images.classes)
    messages = [*trained.messages, *decoder]
    return EvaluatedBoxes(config.model.model, classes, folder, found, messages, bad)


def write_detections(path: Path, images: BoxList, found: BoxPredictions) -> None:
    """Write boxes in the form of COCO's results."""
    ids, categories = images.annotations.arrays.image_ids[images.numbers], images.annotations.category_ids
    sides = found.boxes.astype(float)
    sides[:, 2:] -= sides[:, :2]
    columns = (ids[found.images].tolist(), found.classes.tolist(), sides.tolist(), found.scores.tolist())
    records = [
        {"image_id": image, "category_id": categories[kind], "bbox": box, "score": score}
        for image, kind, box, score in zip(*columns, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(records).encode())


def text_of(request: DenseRequest, result: EvaluatedBoxes, worst: int) -> list[str]:
    """Return the result as lines, with the classes of lowest average precision."""
    found, metrics = result.found, result.found.as_metrics()
    rows = [
        ("AP", f"{metrics['ap']:.3f} %, the mean over IoU 0.50 to 0.95"),
        ("AP50 AP75", f"{metrics['ap50']:.3f} %, {metrics['ap75']:.3f} %"),
        (
            "by size",
            ", ".join(
                f"{size} {metrics[f'ap_{size}']:.3f} %"
                for size in ("small", "medium", "large")
                if f"ap_{size}" in metrics
            ),
        ),
        ("AR100", f"{metrics['ar100']:.3f} %"),
    ]
    images = f"{found.images:,} of {result.data}; {found.bad_samples:,} damaged ones left out"
    lines = lines_of(request, f"{result.model}, {request.precision}", result.messages, images, rows)
    return lines + worst_lines(class_precision(result), worst)


def class_precision(result: EvaluatedBoxes) -> dict[str, float]:
    """Return the average precision in per cent of each class that has true boxes."""
    pairs = zip(result.classes, result.found.metrics.ap_of_classes.tolist(), strict=True)
    return {name: 100 * value for name, value in pairs if value != NO_TRUTH}


def json_record(request: DenseRequest, result: EvaluatedBoxes, ranks: int) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        **request.record(),
        "model": result.model,
        "data": result.data,
        "ranks": ranks,
        **result.found.as_metrics(),
        "classes": class_precision(result),
    }


def _list(request: DenseRequest) -> BoxList:
    return list_boxes(find_boxes(Path(request.data_dir), request.split), None)
