"""Evaluates a trained segmentation network on one rank or many, and writes what it predicts.

Whatever can be wrong with the request is checked before the first image is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.dense.evaluate import (
    DenseRequest,
    EvaluatedDense,
    Progress,
    open_network,
    request_of,
    settings_of,
)
from horovod_volo.dense.mean_iou import ScenePredictor, count_scenes, ious
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.dense.scene_loader import Scene, SceneEvalLoader
from horovod_volo.dense.scene_shards import open_scenes
from horovod_volo.evaluation.task_results import EVALUATIONS
from horovod_volo.models.precision import autocast
from horovod_volo.monitor.pictures import class_colors


def measure_scenes(options: Mapping[str, Any], world: World, progress: Progress) -> EvaluatedDense:
    """Evaluate a network on every image once. Collective: every rank calls this."""
    request = request_of(options)
    config = world.run_on_all_ranks(partial(_settings, request))
    scenes = world.run_on_rank_zero(partial(open_scenes, Path(request.data_dir), request.split))
    trained = open_network(request, config, scenes, world)
    predictor = ScenePredictor(
        config.segmentation,
        config.model.img_size,
        trained.normalization,
        trained.device,
        batch=request.batch_size,
        scales=request.scales,
        flip=request.flip,
    )
    loader = SceneEvalLoader(
        scenes, trained.settings, rank=world.rank, size=world.size, threads=trained.threads
    )
    own, done = len(range(world.rank, len(scenes), world.size)), count(1)

    def on_scene(scene: Scene, predicted: Tensor) -> None:
        progress(next(done), own)
        if request.predictions:
            write_prediction(Path(request.predictions), scenes, scene.number, predicted)

    with closing(loader), torch.inference_mode(), autocast(request.precision, trained.device):
        counts = count_scenes(trained.network, loader, scenes, predictor, world, trained.device, on_scene)
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    metrics, mode = counts.metrics(), config.segmentation.test_mode
    class_ious = zip(scenes.classes, 100 * ious(counts.confusion), strict=True)
    return EvaluatedDense(
        request,
        config.model.model,
        options={"test_mode": mode, "scales": request.scales, "flip": request.flip},
        data=str(scenes.root),
        metrics=metrics,
        rows=[
            ("mean IoU", f"{metrics['miou']:.3f} %"),
            ("pixels", f"{metrics['pixel_accuracy']:.3f} % right"),
            ("classes", f"{metrics['class_accuracy']:.3f} % right on average"),
        ],
        # Of the classes that are in the masks or predicted.
        classes={name: float(iou) for name, iou in class_ious if not np.isnan(iou)},
        messages=trained.messages,
        bad_samples=bad,
    )


def _settings(request: DenseRequest) -> Config:
    if any(not scale > 0 for scale in request.scales):
        raise UserError("--scales takes factors above 0.")
    config = settings_of(request)
    if request.test_mode == "run":
        return config
    return replace(config, segmentation=replace(config.segmentation, test_mode=request.test_mode))


def write_prediction(folder: Path, scenes: SceneList, number: int, predicted: Tensor) -> None:
    """Write the classes of an image, in ADE20K's layout counted from 1 as its server wants them."""
    classes = predicted.to(torch.uint8).cpu().numpy() + np.uint8(scenes.layout.zero_is_ignored)
    image = Image.fromarray(classes, mode="P")
    image.putpalette(class_colors().ravel().tolist())
    path = (folder / scenes.names[number]).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        image.save(file, format="PNG")


EVALUATIONS.register("segmentation", measure_scenes)
