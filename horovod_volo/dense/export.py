"""Exports trained networks for pixels and for boxes: a state dict, and what an ONNX file computes.

Segmentation gives logits at the images' height and width, detection decoded boxes and probabilities.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.config.schema import Config
from horovod_volo.dense.anchors import anchor_rule, build_anchors, decode
from horovod_volo.dense.evaluate import DENSE_TASKS, settings_of_weights
from horovod_volo.dense.mean_iou import logits_of
from horovod_volo.evaluation.task_results import EXPORTS
from horovod_volo.models.timm_export import CONFIG, STATE_DICT
from horovod_volo.models.weights import read_weights
from horovod_volo.models.weights_header import read_class_names, statistics_of_run
from horovod_volo.monitor.pictures import class_colors


@dataclass(frozen=True)
class TrainedDense:
    """A trained network for pixels or boxes, on the CPU, in evaluation mode."""

    network: nn.Module
    config: Config
    num_classes: int
    messages: list[str]
    class_names: tuple[str, ...]  # in the order of the logits; none if the weights do not have them
    image_side: int  # in training
    mean: tuple[float, ...]  # of each channel of training pixels from 0 to 1
    std: tuple[float, ...]
    takes_any_size: bool  # images may have any height and width

    def outputs(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with the outputs of an evaluation, and their names."""
        if self.takes_any_size:
            return PixelLogits(self.network).eval(), ("logits",)
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
        task = DENSE_TASKS[self.config.model.task]
        config = replace(self.config, model=replace(self.config.model, use_ema=False))
        again = task.build(config, self.num_classes)
        again.load_weights(str(folder / STATE_DICT))
        with torch.inference_mode():
            first, other = (_joined(network(images)) for network in (self.network, again.module.eval()))
        return float((first - other).abs().max())


class PixelLogits(nn.Module):
    """Logits (batch, classes, height, width) of images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits at the images' height and width."""
        return logits_of(self.network, images)


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


def load_dense(source: str, image_side: int, use_ema: bool) -> TrainedDense:
    """Build a run's network and load its weights; `image_side` 0: the image size of its training."""
    config = settings_of_weights(source, use_ema=use_ema)
    if image_side:
        config = replace(config, model=replace(config.model, img_size=image_side))
    task = DENSE_TASKS[config.model.task]
    task.complete(config)
    weights, _ = read_weights(source, use_ema=use_ema)
    classes = task.classes_in(config, weights)
    network = task.build(config, classes)
    messages = network.load_weights(source)
    return TrainedDense(
        network.module.eval().requires_grad_(False),
        config,
        classes,
        messages,
        read_class_names(source),
        config.model.img_size,
        *statistics_of_run(config.data, config.model.model),
        takes_any_size=config.model.task == "segmentation",
    )


def _joined(outputs: Any) -> Tensor:
    parts = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.cat([part.flatten() for part in parts])


for _task in DENSE_TASKS:
    EXPORTS.register(_task, load_dense)
