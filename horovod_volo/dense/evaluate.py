"""Evaluates a trained network for pixels or boxes on one rank or many, and writes what it predicts.

Whatever can be wrong with the request is checked before the first image is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from torch import nn

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config
from horovod_volo.config.values import assemble
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import DecoderName
from horovod_volo.dense.detection import DetectionTask
from horovod_volo.dense.segmentation import SegmentationTask
from horovod_volo.dense.task import DenseTask, Views, rank_context
from horovod_volo.engine.task import Metrics, Samples
from horovod_volo.evaluation.task_results import EVALUATIONS
from horovod_volo.models.precision import fix_convolutions, set_tf32
from horovod_volo.models.pretrained import settings_of_run
from horovod_volo.models.weights import read_weights
from horovod_volo.models.weights_header import read_class_names, statistics_of_run

DENSE_TASKS: Mapping[str, DenseTask] = {
    "segmentation": SegmentationTask(),
    "detection": DetectionTask(),
}


@dataclass(frozen=True)
class DenseRequest:
    """The network, the images and the settings of an evaluation."""

    data_dir: str
    weights: str  # of a run
    use_ema: bool
    batch_size: int  # images, or windows of an image, that are predicted at once
    workers: int  # 0: one per core of the rank
    image_decoder: DecoderName
    precision: str
    split: Literal["train", "val"]
    predictions: str = ""  # folder; empty: none are written
    # Of segmentation alone:
    test_mode: Literal["run", "whole", "slide"] = "run"
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False


@dataclass(frozen=True)
class EvaluatedDense:
    """The result of an evaluation, the same on every rank."""

    request: DenseRequest
    model: str
    options: dict[str, Any]  # of segmentation
    data: str  # the folder of the images
    metrics: Metrics
    rows: list[tuple[str, str]]  # the metrics in words
    classes: dict[str, float]  # the metric of each class in per cent
    messages: list[str]  # on the weights and the decoder
    bad_samples: list[str]  # one message for each damaged image

    def text(self, worst: int) -> list[str]:
        """Return the result as lines, with the classes of lowest value."""
        request = self.request
        images, bad = self.metrics["images"], self.metrics["bad_samples"]
        scales = " ".join(f"{scale:g}" for scale in request.scales) + ", mirrored too" * request.flip
        how = f"; {self.options['test_mode']} images at scales {scales}" if self.options else ""
        properties = [
            ("weights", request.weights),
            ("model", f"{self.model}, {request.precision}{how}"),
            *(("", message) for message in self.messages),
            ("images", f"{images:,} of {self.data}; {bad:,} damaged ones left out"),
            *self.rows,
        ]
        lowest = sorted(self.classes.items(), key=lambda row: row[1])[:worst]
        width = max((len(name) for name, _ in lowest), default=0)
        return [
            *(f"{name:<10}{value}" for name, value in properties),
            *([""] if lowest else []),
            *(f"{name:<{width}}  {value:>6.2f} %" for name, value in lowest),
        ]

    def record(self, ranks: int) -> dict[str, Any]:
        """Return the result as plain values."""
        request = self.request
        return {
            "weights": request.weights,
            "use_ema": request.use_ema,
            "precision": request.precision,
            "model": self.model,
            "data": self.data,
            **self.options,
            "ranks": ranks,
            **self.metrics,
            "classes": self.classes,
        }


def evaluate(
    options: Mapping[str, Any], world: World, progress: Callable[[int, int], object]
) -> EvaluatedDense:
    """Evaluate a network on every image once, as the options of the command line or of a program say.

    `progress` is given this rank's images that are done, and all of its images.

    Collective: every rank calls this.
    """
    given = {name: options[name] for name in DenseRequest.__dataclass_fields__ if name in options}
    request = DenseRequest(**given | {"scales": tuple(options.get("scales", (1.0,)))})
    config = world.run_on_all_ranks(partial(_settings, request))
    task = DENSE_TASKS[config.model.task]
    decoder = world.run_on_all_ranks(partial(task.decoder_messages, config))
    images = world.run_on_rank_zero(partial(task.list_split, Path(request.data_dir), request.split))
    network, messages = _open_network(request, config, images, world)
    resources = rank_resources(world)
    network.eval().requires_grad_(False).to(resources.device)
    set_tf32(request.precision)
    fix_convolutions(network, request.precision, resources.device)
    context = rank_context(config, world, resources, precision=request.precision, workers=request.workers)
    # No number of damaged images ends the evaluation: the result names and counts them.
    config = replace(config, data=replace(config.data, bad_samples_limit=len(images)))
    evaluation = task.build_evaluation(config, images, context)
    evaluation.views = Views(request.scales, request.flip)
    own, done = len(range(world.rank, len(images), world.size)), count(1)
    predictions = Path(request.predictions) if request.predictions else None
    with closing(evaluation):
        measured = evaluation.measure(network, lambda _: progress(next(done), own), predictions=predictions)
    bad = list(chain(*world.allgather_object(evaluation.bad_samples.new_messages())))
    return EvaluatedDense(
        request,
        config.model.model,
        options=evaluation.options,
        data=str(evaluation.folder),
        metrics=measured.metrics,
        rows=evaluation.rows(measured.metrics),
        classes=measured.classes,
        messages=[*messages, *decoder],
        bad_samples=bad,
    )


def _settings(request: DenseRequest) -> Config:
    """Return a run's settings with those of the request; raise UserError if it cannot be met."""
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
    config = settings_of_weights(request.weights, use_ema=request.use_ema)
    mode = config.segmentation.test_mode if request.test_mode == "run" else request.test_mode
    statistics = statistics_of_run(config.data, config.model.model)
    return replace(
        config,
        data=Data(
            batch_size=request.batch_size,
            image_decoder=request.image_decoder,
            bad_samples="skip",
            mean=statistics.mean,
            std=statistics.std,
        ),
        segmentation=replace(config.segmentation, test_mode=mode),
    )


def settings_of_weights(source: str, *, use_ema: bool) -> Config:
    """Return the settings of the run that weights are of, to load all of them."""
    config = assemble(dict(settings_of_run(source)), fallback_name="")
    return replace(config, model=replace(config.model, use_ema=use_ema, allow_mismatch=""))


def _open_network(
    request: DenseRequest, config: Config, images: Samples, world: World
) -> tuple[nn.Module, list[str]]:
    """Build and load a run's network, and return messages. Collective: every rank calls this."""
    task = DENSE_TASKS[config.model.task]

    def load() -> tuple[nn.Module, list[str]]:
        weights, _ = read_weights(request.weights, use_ema=request.use_ema)
        classes = task.classes_in(config, weights)
        if classes != len(images.classes):
            raise UserError(
                f"{request.data_dir} has {len(images.classes)} classes, but {request.weights} is for "
                f"{classes}. Give images of the classes that it was trained on."
            )
        names = read_class_names(request.weights)  # weights of earlier versions have none
        for number, (name, trained) in enumerate(zip(images.classes, names, strict=False)):
            if name != trained:
                raise UserError(
                    f"class {number} is {name} in {request.data_dir}, but {trained} in {request.weights}. "
                    "Give images whose classes have the names and the order of its training."
                )
        network = task.build(config, classes)
        return network.module, network.load_weights(request.weights)

    network, messages = world.run_on_all_ranks(load)
    world.assert_identical(network.parameters(), "The weights")
    return network, messages


for _task in DENSE_TASKS:
    EVALUATIONS.register(_task, evaluate)
