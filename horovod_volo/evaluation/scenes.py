"""Evaluates a trained segmentation network on one rank or many, and writes what it predicts.

Whatever can be wrong with the request is checked before the first image is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config, Data
from horovod_volo.config.values import assemble
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.pipeline import Normalization
from horovod_volo.data.scenes.scene_list import SceneList, Split, find_layout, list_scenes
from horovod_volo.data.scenes.scene_loader import Scene, SceneEvalLoader
from horovod_volo.models.build import spec_of
from horovod_volo.models.dense.upernet import HEADS
from horovod_volo.models.precision import autocast, fix_convolutions, set_tf32
from horovod_volo.models.pretrained import settings_of_run
from horovod_volo.models.weights import read_weights
from horovod_volo.tasks.mean_iou import SceneCounts, ScenePredictor, count_scenes
from horovod_volo.tasks.pictures import class_colors
from horovod_volo.tasks.segmentation import SegmentationTask

Progress = Callable[[int, int], None]  # given this rank's images that are done, and all of its images


@dataclass(frozen=True)
class SceneRequest:
    """The network, the images and the settings of an evaluation."""

    data_dir: str
    weights: str  # of a run
    use_ema: bool
    batch_size: int  # windows of an image that are predicted at once
    workers: int  # 0: one per core of the rank
    precision: str
    split: Split
    test_mode: Literal["run", "whole", "slide"]
    scales: tuple[float, ...]
    flip: bool
    predictions: str  # folder; empty: none are written


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
    scenes = world.run_on_rank_zero(partial(_list, request))
    resources = rank_resources(world)
    network, messages = world.run_on_all_ranks(partial(_load, request, config, scenes))
    world.assert_identical(network.parameters(), "The weights")
    network.eval().requires_grad_(False).to(resources.device)
    set_tf32(request.precision)
    fix_convolutions(network, request.precision, resources.device)
    spec, device = spec_of(config.model.model), resources.device
    predictor = ScenePredictor(
        config.segmentation,
        config.model.img_size,
        Normalization(spec.mean, spec.std),
        device,
        batch=request.batch_size,
        scales=request.scales,
        flip=request.flip,
    )
    # No number of damaged images ends the evaluation: the result names and counts them.
    settings = Data(bad_samples="skip", bad_samples_limit=len(scenes))
    threads = request.workers or resources.threads
    loader = SceneEvalLoader(scenes, settings, rank=world.rank, size=world.size, threads=threads)
    own, done = len(range(world.rank, len(scenes), world.size)), 0

    def on_scene(scene: Scene, predicted: Tensor) -> None:
        nonlocal done
        done += 1
        progress(done, own)
        if request.predictions:
            write_prediction(Path(request.predictions), scenes, scene.number, predicted)

    with closing(loader), torch.inference_mode(), autocast(request.precision, device):
        counts = count_scenes(network, loader, scenes, predictor, world, device, on_scene)
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    mode, classes = config.segmentation.test_mode, tuple(scenes.classes)
    return EvaluatedScenes(config.model.model, mode, classes, str(scenes.root), counts, messages, bad)


def _settings(request: SceneRequest) -> Config:
    if any(not scale > 0 for scale in request.scales):
        raise UserError("--scales takes factors above 0.")
    if request.predictions:
        try:
            Path(request.predictions).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--predictions cannot create {request.predictions}: {error.strerror}. Name another folder."
            ) from None
        if not os.access(request.predictions, os.W_OK):
            raise UserError(f"--predictions cannot write into {request.predictions}. Name another folder.")
    config = assemble(dict(settings_of_run(request.weights)), fallback_name="")
    config = replace(config, model=replace(config.model, use_ema=request.use_ema, allow_mismatch=""))
    if request.test_mode == "run":
        return config
    return replace(config, segmentation=replace(config.segmentation, test_mode=request.test_mode))


def _load(request: SceneRequest, config: Config, scenes: SceneList) -> tuple[nn.Module, list[str]]:
    weights, _ = read_weights(request.weights, use_ema=request.use_ema)
    classes = max((len(weights.get(f"{head}.bias", ())) for head in HEADS), default=0)
    if classes != len(scenes.classes):
        raise UserError(
            f"{scenes.root} has {len(scenes.classes)} classes, but the network of {request.weights} has "
            f"{classes}. Give images of the classes that it was trained on."
        )
    task = SegmentationTask()
    network = task.build_network(config, classes)
    return network, task.load_weights(network, config, request.weights)


def _list(request: SceneRequest) -> SceneList:
    root = Path(request.data_dir)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}. Give the folder of the images and masks.")
    return list_scenes(root, find_layout(root), request.split)


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
    properties = [
        ("weights", request.weights),
        ("model", f"{result.model}, {request.precision}; {result.test_mode} images at scales {scales}"),
        *(("", message) for message in result.messages),
        ("images", f"{counts.images:,} of {result.data}; {counts.bad_samples:,} damaged ones left out"),
        ("mean IoU", f"{metrics['miou']:.3f} %"),
        ("pixels", f"{metrics['pixel_accuracy']:.3f} % right"),
        ("classes", f"{metrics['class_accuracy']:.3f} % right on average"),
    ]
    lines = [f"{name:<10}{value}" for name, value in properties]
    rows = sorted(class_ious(result).items(), key=lambda row: row[1])[:worst]
    width = max((len(name) for name, _ in rows), default=0)
    return [*lines, *([""] if rows else []), *(f"{name:<{width}}  {iou:>6.2f} %" for name, iou in rows)]


def class_ious(result: EvaluatedScenes) -> dict[str, float]:
    """Return the IoU in per cent of each class that is in the masks or predicted."""
    confusion = result.counts.confusion
    right = confusion.diagonal()
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - right
    pairs = zip(result.classes, right.tolist(), union.tolist(), strict=True)
    return {name: 100 * both / either for name, both, either in pairs if either}


def json_record(request: SceneRequest, result: EvaluatedScenes, ranks: int) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "weights": request.weights,
        "model": result.model,
        "data": result.data,
        "use_ema": request.use_ema,
        "precision": request.precision,
        "test_mode": result.test_mode,
        "scales": request.scales,
        "flip": request.flip,
        "ranks": ranks,
        **result.counts.metrics(),
        "classes": class_ious(result),
    }
