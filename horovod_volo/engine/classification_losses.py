"""The losses of a micro-batch of classification: its mixing, its forward pass, and what the log says of its
classes and labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.images.image_list import ImageList
from horovod_volo.engine.task import drop_path_seed
from horovod_volo.models.build import Forward, tokens_per_side
from horovod_volo.objective.loss import BALANCED, Loss, LossParts
from horovod_volo.objective.mixing import NO_BOX, Mix, draw_box, draw_image_mix
from horovod_volo.token_labels.source import LabelSource


@dataclass
class ClassificationLosses:
    """The forward pass and the loss of a micro-batch, mixed."""

    forward: Forward
    loss: Loss
    mix: Callable[[int, int], Mix]  # mix(step, micro-batch)
    autocast: torch.autocast
    seed: int
    rank: int

    def __call__(self, batch: TrainBatch, step: int, number: int) -> LossParts:
        """Return the losses of a micro-batch."""
        mix = self.mix(step, number)
        seed = drop_path_seed(self.seed, step, self.rank, number)
        with self.autocast:
            class_logits, token_logits = self.forward(mix.images(batch.images), mix.swap_tokens, seed)
        return self.loss(class_logits, token_logits, batch.labels, mix)


def build_mix(config: Config, world: World) -> Callable[[int, int], Mix]:
    """Return MixToken, mixup/CutMix or no mixing as a function of the step and the micro-batch's number."""
    seed, objective = config.run.seed, config.objective
    if objective.mix_token:
        side = tokens_per_side(config.model.model, config.model.img_size)
        return lambda step, number: draw_box(seed, step, world.rank, number, side)
    if objective.mixup or objective.cutmix:
        pixels = config.model.img_size
        return lambda step, number: draw_image_mix(objective, seed, step, world.rank, number, pixels)
    return lambda step, number: NO_BOX  # noqa: ARG005


def labels_line(config: Config, label_maps: LabelSource | None) -> str:
    """Describe the training labels."""
    if not config.objective.token_label:
        mixed = ", mixed in pairs of images by MixToken (--no-mix-token disables it)"
        return "class labels" + mixed * config.objective.mix_token
    side = tokens_per_side(config.model.model, config.model.img_size)
    if label_maps is None:
        return f"{side} x {side} token labels, the image's class on every token"
    geometry = f"{config.objective.label_geometry} geometry, maps of {label_maps.geometry.description}"
    return f"{side} x {side} token labels from {config.objective.token_label_data} ({geometry})"


def token_size_warnings(config: Config) -> list[str]:
    """Return a warning if --token-label-size is not the number of tokens per side, which is used instead."""
    given = config.objective.token_label_size
    side = tokens_per_side(config.model.model, config.model.img_size)
    if not config.objective.token_label or given in (0, side):
        return []
    return [
        f"--token-label-size {given} does not fit --img-size {config.model.img_size}: "
        f"the network has {side} x {side} tokens, so {side} is used"
    ]


def balance_warnings(config: Config, train: ImageList) -> list[str]:
    """Return a warning if classes are to be balanced that have equally many images."""
    is_balanced = len(set(np.bincount(train.targets).tolist())) == 1
    flags = ["--balance"] * bool(config.data.balance)
    flags += ["--class-weights balanced"] * (config.objective.class_weights == BALANCED)
    return [f"{flag} has no effect: all classes have equally many images" for flag in flags if is_balanced]


def class_counts(config: Config, train: ImageList) -> str:
    """Return the number of classes and, if some are to count more, how rare the rarest is."""
    counts = np.bincount(train.targets)
    rare = f" of {counts[counts > 0].min():,} to {counts.max():,} images"
    return (
        f"{len(train.classes):,} classes{rare * bool(config.data.balance or config.objective.class_weights)}"
    )
