"""Evaluates a trained detector on one rank or many, and writes what it finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import World
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.data.image_decoder import decoder_messages
from horovod_volo.dense.anchors import anchor_rule, build_anchors
from horovod_volo.dense.average_precision import NO_TRUTH, BoxPredictions
from horovod_volo.dense.box_evaluation import BoxPredictor, build_eval_loader, find_in_all
from horovod_volo.dense.box_list import BoxList, find_boxes, list_boxes
from horovod_volo.dense.evaluate import (
    EvaluatedDense,
    Progress,
    open_network,
    request_of,
    settings_of,
)
from horovod_volo.engine.task import Metrics
from horovod_volo.evaluation.task_results import EVALUATIONS
from horovod_volo.models.precision import autocast


def measure_found(options: Mapping[str, Any], world: World, progress: Progress) -> EvaluatedDense:
    """Evaluate a detector on every image once. Collective: every rank calls this."""
    request = request_of(options)
    config = world.run_on_all_ranks(partial(settings_of, request))
    decoder = world.run_on_all_ranks(partial(decoder_messages, request.image_decoder))
    files = world.run_on_rank_zero(partial(find_boxes, Path(request.data_dir), request.split))
    images = world.run_on_rank_zero(partial(list_boxes, files, None))
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
    own, done = len(range(world.rank, len(images), world.size)), count(1)
    with closing(loader):
        found = find_in_all(
            trained.network,
            loader,
            images,
            BoxPredictor(config.detection, anchors, loader.batch_size),
            world,
            autocast(request.precision, trained.device),
            lambda *_: progress(next(done), own),
        )
    if request.predictions:
        path = Path(request.predictions) / f"detections_{request.split}.json"
        world.run_on_rank_zero(partial(write_detections, path, images, found.predictions))
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    precision = zip(images.classes, found.metrics.ap_of_classes.tolist(), strict=True)
    return EvaluatedDense(
        request,
        config.model.model,
        options={},
        data=str(images.files.images),
        metrics=found.as_metrics(),
        rows=_rows(found.as_metrics()),
        classes={name: 100 * value for name, value in precision if value != NO_TRUTH},
        messages=[*trained.messages, *decoder],
        bad_samples=bad,
    )


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


def _rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Return metrics in words."""
    sizes = [size for size in ("small", "medium", "large") if f"ap_{size}" in metrics]
    return [
        ("AP", f"{metrics['ap']:.3f} %, the mean over IoU 0.50 to 0.95"),
        ("AP50 AP75", f"{metrics['ap50']:.3f} %, {metrics['ap75']:.3f} %"),
        ("by size", ", ".join(f"{size} {metrics[f'ap_{size}']:.3f} %" for size in sizes)),
        ("AR100", f"{metrics['ar100']:.3f} %"),
    ]


EVALUATIONS.register("detection", measure_found)
