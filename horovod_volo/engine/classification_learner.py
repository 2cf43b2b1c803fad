"""What a run of classification does with its micro-batches on one rank: mix, forward, loss, and evaluate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.engine.accuracy import measure_model
from horovod_volo.engine.classification_data import Images
from horovod_volo.engine.confusions import ConfusionRecorder
from horovod_volo.engine.task import Beat, Learner, Metrics, drop_path_seed
from horovod_volo.engine.training_pictures import draw_batch
from horovod_volo.models.build import Forward, spec_of, tokens_per_side, training_forward
from horovod_volo.models.precision import autocast
from horovod_volo.models.weights_header import statistics_of_run
from horovod_volo.monitor.pictures import Picture
from horovod_volo.objective.loss import Loss, LossParts, build_loss
from horovod_volo.objective.mixing import NO_BOX, Mix, draw_box, draw_image_mix


class Logits(NamedTuple):
    """What the network makes of a mixed micro-batch."""

    classes: Tensor  # (batch, classes)
    tokens: Tensor  # (batch, tokens, classes), swapped back into unmixed order
    mix: Mix


@dataclass
class ClassificationLearner(Learner[TrainBatch, Logits]):
    """The network of a run, its mixing and its loss, fed by its loaders."""

    config: Config
    world: World
    device: torch.device
    images: Images
    train_loader: TrainLoader
    eval_loader: EvalLoader
    network: nn.Module
    network_forward: Forward
    criterion: Loss
    mix: Callable[[int, int], Mix]  # mix(step, micro-batch)
    autocast: torch.autocast

    loss_names = LossParts._fields

    def __post_init__(self) -> None:
        self.bad_held_out = self.eval_loader.bad_samples
        self.classes: NDArray[np.int32] | None = None
        if self.config.data.balance:
            self.classes = self.images.train.targets
        self._confusions = ConfusionRecorder(self.images.held_out if self.world.is_rank_zero else None)

    def forward(self, batch: TrainBatch, step: int, number: int) -> Logits:
        """Return the logits of mixed images."""
        mix = self.mix(step, number)
        seed = drop_path_seed(self.config.run.seed, step, self.world.rank, number)
        with self.autocast:
            logits = self.network_forward(mix.images(batch.images), mix.swap_tokens, seed)
        return Logits(*logits, mix)

    def loss(self, outputs: Logits, batch: TrainBatch) -> LossParts:
        """Return the losses of the class and, with token labels, of the tokens."""
        return self.criterion(outputs.classes, outputs.tokens, batch.labels, outputs.mix)

    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the accuracy of a model on the held-out images. Collective: every rank calls this."""
        return measure_model(
            model,
            beat,
            loader=self.eval_loader,
            catalog=self.images.held_out,
            world=self.world,
            device=self.device,
            arithmetic=self.autocast,
            confusions=self._confusions,
        )

    def close(self) -> None:
        """End the threads of the evaluation, and close all files."""
        self.eval_loader.close()
        self.images.close()

    def pictures(self) -> Mapping[str, Picture]:
        """Return the worst confusions of the last evaluation."""
        return self._confusions.pictures()

    def files(self, step: int) -> Mapping[str, str]:
        """Return the confusions of the last evaluation."""
        return self._confusions.files(step)

    def training_pictures(self, batch: TrainBatch, step: int) -> Mapping[str, Picture]:
        """Return pictures of the first images of a micro-batch, the first of a step."""
        mix = self.mix(step, 0)
        return draw_batch(batch, mix, self.criterion, self.network, self.images.train.classes, self.config)


def build_learner(
    config: Config, world: World, images: Images, resources: RankResources, network: nn.Module
) -> ClassificationLearner:
    """Build this rank's loaders and losses."""
    train_loader, eval_loader = build_loaders(config, world, images, resources)
    side = tokens_per_side(config.model.model, config.model.img_size)
    return ClassificationLearner(
        config=config,
        world=world,
        device=resources.device,
        images=images,
        train_loader=train_loader,
        eval_loader=eval_loader,
        network=network,
        network_forward=training_forward(network),
        criterion=build_loss(config.objective, len(images.train.classes), side, images.class_weights),
        mix=build_mix(config, world),
        autocast=autocast(config.model.precision, resources.device),
    )


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


def build_loaders(
    config: Config, world: World, images: Images, resources: RankResources
) -> tuple[TrainLoader, EvalLoader]:
    """Build this rank's loaders; images are normalised, and resized for evaluation, as the model expects."""
    threads = config.data.workers or resources.threads
    spec = spec_of(config.model.model)
    normalization = Normalization(*statistics_of_run(config.data, config.model.model))
    train_loader = TrainLoader(
        images.train,
        images.label_maps,
        config.data,
        image_size=config.model.img_size,
        seed=config.run.seed,
        rank=world.rank,
        size=world.size,
        accumulation=config.update.accumulation,
        device=resources.device,
        threads=threads,
        normalization=normalization,
    )
    eval_loader = EvalLoader(
        images.held_out,
        config.data,
        image_size=config.model.img_size,
        crop_pct=config.data.crop_pct or spec.crop_pct,
        interpolation=spec.interpolation,
        rank=world.rank,
        size=world.size,
        device=resources.device,
        threads=threads,
        normalization=normalization,
    )
    return train_loader, eval_loader
