"""Evaluates a trained segmentation network on one rank or many, and writes what it predicts.

Whatever can be wrong with the request is checked before the first image is read.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.scenes.scene_list import SceneList
from horovod_volo.data.scenes.scene_loader import Scene, SceneEvalLoader
from horovod_volo.data.scenes.scene_shards import open_scenes
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
from horovod_volo.tasks.mean_iou import SceneCounts, ScenePredictor, count_scenes, ious
from horovod_volo.tasks.pictures import class_colors


@dataclass(frozen=True)
class SceneRequest(DenseRequest):
    """The network, the images and the settings of an evaluation of pixels."""

    test_mode: Literal["run", "whole", "slide"]
    scales: tuple[float, ...]
    flip: bool


@dataclass(frozen=True)
class EvaluatedScenes:
    """The result of an evaluation, the same on every rank."""

    model: str
    test_mode: str
    classes: tuple[str, ...]
    data: str  # the folder of the images
    counts: SceneCounts
    messages: list[str]  # on the weights
    bad_samples: list[str]  # one message for each damaged image


def measure_scenes(request: SceneRequest, world: World, progress: Progress) -> EvaluatedScenes:
    """Evaluate a network on every image once. Collective: every rank calls this."""
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
    counter = CountedProgress(progress, world, len(scenes))

    def on_scene(scene: Scene, predicted: Tensor) -> None:
        counter.one()
        if request.predictions:
            write_prediction(Path(request.predictions), scenes, scene.number, predicted)

    with closing(loader), torch.inference_mode(), autocast(request.precision, trained.device):
        counts = count_scenes(trained.network, loader, scenes, predictor, world, trained.device, on_scene)
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    mode, classes = config.segmentation.test_mode, tuple(scenes.classes)
    return EvaluatedScenes(config.model.model, mode, classes, str(scenes.root), counts, trained.messages, bad)


def _settings(request: SceneRequest) -> Config:
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


def text_of(request: SceneRequest, result: EvaluatedScenes, worst: int) -> list[str]:
    """Return the result as lines, with the classes of lowest IoU."""
    metrics, counts = result.counts.metrics(), result.counts
    scales = " ".join(f"{scale:g}" for scale in request.scales) + ", mirrored too" * request.flip
    lines = lines_of(
        request,
        f"{result.model}, {request.precision}; {result.test_mode} images at scales {scales}",
        result.messages,
        f"{counts.images:,} of {result.data}; {counts.bad_samples:,} damaged ones left out",
        [
            ("mean IoU", f"{metrics['miou']:.3f} %"),
            ("pixels", f"{metrics['pixel_accuracy']:.3f} % right"),
            ("classes", f"{metrics['class_accuracy']:.3f} % right on average"),
        ],
    )
    return lines + worst_lines(class_ious(result), worst)


def class_ious(result: EvaluatedScenes) -> dict[str, float]:
    """Return the IoU in per cent of each class that is in the masks or predicted."""
    pairs = zip(result.classes, 100 * ious(result.counts.confusion), strict=True)
    return {name: float(iou) for name, iou in pairs if not np.isnan(iou)}


def json_record(request: SceneRequest, result: EvaluatedScenes, ranks: int) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        **request.record(),
        "model": result.model,
        "data": result.data,
        "test_mode": result.test_mode,
        "scales": request.scales,
        "flip": request.flip,
        "ranks": ranks,
        **result.counts.metrics(),
        "classes": class_ious(result),
    }
