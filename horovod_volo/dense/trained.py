"""What the commands `evaluate` and `export` do with a trained network for pixels or for boxes.

An export has a state dict and an ONNX file: segmentation gives logits at the images' height and width,
detection decoded boxes and probabilities.
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.data_settings import Data
from horovod_volo.config.recipe import assemble
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.dense.anchors import anchor_rule, build_anchors, decode
from horovod_volo.dense.dense_batches import RankContext
from horovod_volo.dense.task import DenseTask, Views
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.task import Samples
from horovod_volo.evaluation.task_results import EVALUATIONS, EXPORTS, Evaluated, Progress
from horovod_volo.models.precision import prepare_precision
from horovod_volo.models.pretrained import settings_of_run
from horovod_volo.models.timm_export import CONFIG, STATE_DICT
from horovod_volo.models.weights import read_weights
from horovod_volo.models.weights_header import read_class_names, statistics_of_run
from horovod_volo.monitor.pictures import class_colors


def dense_task(name: str) -> DenseTask:
    """Return the task of a name, one of the two."""
    task = TASKS.find(name)
    assert isinstance(task, DenseTask)
    return task


def load_dense(source: str, image_side: int, use_ema: bool) -> "TrainedDense":
    """Build a run's network and load its weights; `image_side` 0: the image size of its training."""
    config = assemble(dict(settings_of_run(source)), fallback_name="")
    side = image_side or config.model.img_size
    config = replace(config, model=replace(config.model, img_size=side, use_ema=use_ema, allow_mismatch=""))
    task = dense_task(config.model.task)
    task.complete(config)
    weights, _ = read_weights(source, use_ema=use_ema)
    classes = task.classes_in(config, weights)
    if classes < 1:
        raise UserError(f"{source} has no heads for {config.model.task}. Give the weights of such a run.")
    network = task.build(config, classes)
    messages = network.load_weights(source)
    return TrainedDense(
        network.module.eval().requires_grad_(False),
        config,
        classes,
        messages,
        read_class_names(source),
        side,
        *statistics_of_run(config.data, config.model.model),
        takes_any_size=config.model.task == "segmentation",
    )


def evaluate(request: Namespace, world: World, progress: Progress) -> Evaluated:
    """Evaluate a network on every image once. Collective: every rank calls this."""
    world.run_on_all_ranks(partial(_check, request))
    task = dense_task(str(settings_of_run(request.weights)["task"]))
    images = world.run_on_rank_zero(partial(task.list_split, Path(request.data_dir), request.split))
    trained = world.run_on_all_ranks(partial(_load_fitting, request, images))
    network = trained.network
    world.assert_identical(network.parameters(), "The weights")
    data = Data(
        batch_size=request.batch_size,
        workers=request.workers,
        image_decoder=request.image_decoder,
        # No number of damaged images ends the evaluation: the result names and counts them.
        bad_samples="skip",
        bad_samples_limit=len(images),
        mean=trained.mean,
        std=trained.std,
    )
    config = replace(
        trained.config, data=data, model=replace(trained.config.model, precision=request.precision)
    )
    decoder = world.run_on_all_ranks(partial(task.decoder_messages, config))
    resources = rank_resources(world)
    network.to(resources.device)
    prepare_precision(network, request.precision, resources.device)
    evaluation = task.learner.evaluation_of(images, RankContext(config, world, resources))
    evaluation.views = Views(tuple(request.scales), request.flip)
    evaluation.predictions = Path(request.predictions) if request.predictions else None
    own, done = len(range(world.rank, len(images), world.size)), count(1)
    with closing(evaluation):
        measured = evaluation.measure(network, lambda _: progress(next(done), own))
    record = {
        "weights": request.weights,
        "use_ema": request.use_ema,
        "precision": request.precision,
        "model": config.model.model,
        "data": str(evaluation.folder),
        **evaluation.options,
        "ranks": world.size,
        **measured.metrics,
        "classes": measured.classes,
    }
    bad = list(chain(*world.allgather_object(evaluation.bad_samples.new_messages())))
    lines = _lines(request, record, [*trained.messages, *decoder], evaluation.rows(measured.metrics))
    return Evaluated(measured.metrics, lines, record, bad)


def _check(request: Namespace) -> None:
    """Raise UserError if predictions cannot be made or written as requested."""
    if any(not scale > 0 for scale in request.scales):
        raise UserError("--scales takes factors above 0.")
    try:
        if request.predictions:
            Path(request.predictions).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=request.predictions):
                pass
    except OSError as error:
        raise UserError(
            f"--predictions cannot write into {request.predictions}: {error.strerror}. Name another folder."
        ) from None


def _load_fitting(request: Namespace, images: Samples) -> "TrainedDense":
    """Load the network; raise UserError if it was trained on other classes than those of the images."""
    trained = load_dense(request.weights, 0, request.use_ema)
    if trained.num_classes != len(images.classes):
        raise UserError(
            f"{request.data_dir} has {len(images.classes)} classes, but {request.weights} is for "
            f"{trained.num_classes}. Give images of the classes that it was trained on."
        )
    # Weights of earlier versions have no names.
    for number, (name, known) in enumerate(zip(images.classes, trained.class_names, strict=False)):
        if name != known:
            raise UserError(
                f"class {number} is {name} in {request.data_dir}, but {known} in {request.weights}. Give "
                "images whose classes have the names and the order of its training."
            )
    return trained


def _lines(
    request: Namespace, record: Mapping[str, Any], messages: list[str], rows: list[tuple[str, str]]
) -> list[str]:
    """Return the lines that are printed, the last ones about the classes of lowest value."""
    scales = " ".join(f"{scale:g}" for scale in request.scales) + ", mirrored too" * request.flip
    how = f"; {record['test_mode']} images at scales {scales}" if "test_mode" in record else ""
    images, bad = record["images"], record["bad_samples"]
    properties = [
        ("weights", request.weights),
        ("model", f"{record['model']}, {request.precision}{how}"),
        *(("", message) for message in messages),
        ("images", f"{images:,} of {record['data']}; {bad:,} damaged ones left out"),
        *rows,
    ]
    lowest = sorted(record["classes"].items(), key=lambda row: row[1])[: request.per_class]
    width = max((len(name) for name, _ in lowest), default=0)
    return [
        *(f"{name:<10}{value}" for name, value in properties),
        *([""] if lowest else []),
        *(f"{name:<{width}}  {value:>6.2f} %" for name, value in lowest),
    ]


@dataclass(frozen=True)
class TrainedDense:
    """A trained network for pixels or boxes, on the CPU in evaluation mode."""

    network: nn.Module
    config: Config  # of its run
    num_classes: int
    messages: list[str]  # on the weights
    class_names: tuple[str, ...]  # in the order of the logits; none if the weights do not have them
    image_side: int
    mean: tuple[float, ...]  # of each channel of training pixels from 0 to 1
    std: tuple[float, ...]
    takes_any_size: bool  # images may have any height and width

    def outputs(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with the outputs of an evaluation, and their names."""
        if self.takes_any_size:
            return self.network.eval(), ("logits",)
        return BoxProbabilities(self.network, self.image_side).eval(), ("boxes", "probabilities")

    def write(self, folder: Path) -> None:
        """Write the weights as mmsegmentation reads them, and what is needed to use them."""
        model = self.config.model
        about: dict[str, Any] = {
            "task": model.task,
            "architecture": model.model,
            "num_classes": self.num_classes,
            "img_size": model.img_size,
            "mean": self.mean,
            "std": self.std,
        }
        meta = about
        if self.class_names:
            about["classes"] = self.class_names
            named = {"classes": self.class_names, "palette": class_colors()[: self.num_classes].tolist()}
            # mmsegmentation 1 reads the first, and 0 the others.
            meta = about | {"dataset_meta": named, "CLASSES": named["classes"], "PALETTE": named["palette"]}
        torch.save({"state_dict": self.network.state_dict(), "meta": meta}, folder / STATE_DICT)
        (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def reloaded_difference(self, folder: Path, images: Tensor) -> float:
        """Return the largest difference of the outputs of a fresh network with the written weights."""
        config = replace(self.config, model=replace(self.config.model, use_ema=False))
        again = dense_task(config.model.task).build(config, self.num_classes)
        again.load_weights(str(folder / STATE_DICT))
        with torch.inference_mode():
            first, other = (_joined(network(images)) for network in (self.network, again.module.eval()))
        return float((first - other).abs().max())


class BoxProbabilities(nn.Module):
    """Boxes and class probabilities of all anchors, before any is dropped."""

    def __init__(self, network: nn.Module, image_side: int) -> None:
        super().__init__()
        self.network, self.anchors = network, build_anchors(anchor_rule(image_side))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes (batch, anchors, 4) as fractions of the image, and probabilities of the classes.

        Probabilities are (batch, anchors, classes), without that of the background.
        """
        values, logits = self.network(images)
        return decode(values, self.anchors), logits.float().softmax(dim=2)[..., 1:]


def _joined(outputs: Any) -> Tensor:
    parts = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.cat([part.flatten() for part in parts])


for _task in ("segmentation", "detection"):
    EVALUATIONS.register(_task, evaluate)
    EXPORTS.register(_task, load_dense)
