"""Classification: the class of an image, learned from classes or from token labels."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.derived import derive, drawing_rank
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import trains_aux_head, uses_tokens
from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.data.augmentation.policy import parse_policy
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.engine import open_settings
from horovod_volo.engine.accuracy import CONFUSIONS, Confusions, ImageScores, find_confusions
from horovod_volo.engine.classification_data import Images, count_images, map_geometry, read_images
from horovod_volo.engine.image_size import check_first_size, resized, training_side
from horovod_volo.engine.task import Beat, Learner, Metrics, Network, Task, drop_path_seed
from horovod_volo.models import build
from horovod_volo.models.precision import autocast
from horovod_volo.models.registry import NORMS_OVER_RANKS
from horovod_volo.models.timm_api import why_missing
from horovod_volo.models.weights import load_weights, read_weights
from horovod_volo.models.weights_header import finetune_warnings, statistics_of_run
from horovod_volo.monitor.logger import Picture
from horovod_volo.objective.loss import LOSSES, Loss, LossParts, build_loss
from horovod_volo.objective.mixing import NO_BOX, Mix, draw_box, draw_image_mix


class Classification:
    """The task of the published training."""

    scores = ("top1", "top5")

    def complete(self, config: Config) -> Config:
        config = open_settings.fit_to_model(config)
        if not config.chooses_model:
            build.check_model(config.model.model, img_size=config.model.img_size, tokens=uses_tokens(config))
            check_first_size(config.model, build.spec_of(config.model.model).stride)
        if config.model.sync_bn == "heads":
            raise UserError("--sync-bn heads is for segmentation and detection. Use --sync-bn all, or none.")
        LOSSES.find(config.objective.loss)
        if config.data.aa:
            parse_policy(config.data.aa)
        map_geometry(config)
        return config if config.chooses_model else open_settings.with_token_size_warning(config)

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:
        facts = open_settings.device_facts(device)
        return self.complete(open_settings.choose_settings(config, images, ranks, facts, why_missing))

    def read(self, config: Config, world: World) -> Images:
        return read_images(config, world)

    def count(self, config: Config) -> tuple[int, int] | None:
        return count_images(config)

    def build(self, config: Config, num_classes: int) -> Network:
        settings = config.model
        network = build.build_model(
            settings.model,
            img_size=settings.img_size,
            num_classes=num_classes,
            drop_path=settings.drop_path,
            grad_checkpoint=settings.grad_checkpoint,
            aux_head=trains_aux_head(config),
            model_kwargs=settings.model_kwargs,
            head_init_scale=settings.head_init_scale,
        )
        if settings.fit_head:
            build.linear_head(network, build.spec_of(settings.model).heads)
        if settings.sync_bn == "all":
            NORMS_OVER_RANKS.find("all").synchronize(network)
        forward = build.training_forward(network)
        return Network(
            network,
            heads=build.spec_of(settings.model).heads,
            training_forward=lambda images: forward(images, lambda tokens: tokens, 0),
            load_weights=partial(_load_weights, network, config),
        )

    def begin(
        self, config: Config, world: World, data: Images, resources: RankResources, network: nn.Module
    ) -> "ClassificationLearner":
        if config.model.sync_bn == "all":
            NORMS_OVER_RANKS.find("all").connect(network, world)
        return ClassificationLearner(config, world, data, resources, network)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"aux_head": trains_aux_head(config)}

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_top1']:.2f} %" if "ema_top1" in metrics else ""
        return (
            f"top-1 {metrics['top1']:.2f} %, top-5 {metrics['top5']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _load_weights(network: nn.Module, config: Config, source: str) -> list[str]:
    settings = config.model
    weights, which = read_weights(source, use_ema=settings.use_ema)
    mismatches = load_weights(
        network, build.our_name(settings.model), weights, source, allowed=settings.allow_mismatch
    )
    return [*which, *mismatches, *finetune_warnings(source, config.data, settings.model)]


class Logits(NamedTuple):
    """What the network makes of a mixed micro-batch."""

    classes: Tensor  # (batch, classes)
    tokens: Tensor  # (batch, tokens, classes), swapped back into unmixed order
    mix: Mix
    side: int  # of the images


class ClassificationLearner(Learner[TrainBatch, Logits]):
    """The network of a run on one rank, its mixing and its loss, fed by its loaders."""

    loss_names = LossParts._fields

    def __init__(
        self, config: Config, world: World, images: Images, resources: RankResources, network: nn.Module
    ) -> None:
        self.config, self.world, self.images, self.network = config, world, images, network
        self.device = resources.device
        self.train_loader, self.build_eval_loader = build_loaders(config, world, images, resources)
        self.eval_loader = self.build_eval_loader(images.held_out)
        self.bad_held_out = self.eval_loader.bad_samples
        self.network_forward = build.training_forward(network)
        self.side = build_side(config, world, len(images.train))  # side(step) of training images
        self.mix = build_mix(config, world, self.side)  # mix(step, micro-batch)
        tokens, classes = partial(build.tokens_per_side, config.model.model), len(images.train.classes)
        # criterion(side of the images)
        self.criterion: Callable[[int], Loss] = cache(
            lambda side: build_loss(config.objective, classes, tokens(side))
        )
        self.criterion(config.model.img_size)  # a mistake in its settings is one before the run begins
        self.autocast = autocast(config.model.precision, resources.device)
        self.confusions: Confusions = {}  # of the better network of the last evaluation

    def forward(self, batch: TrainBatch, step: int, number: int) -> Logits:
        """Return the logits of mixed images."""
        mix, side = self.mix(step, number), self.side(step)
        seed = drop_path_seed(self.config, step, self.world.rank, number)
        with self.autocast:
            images = mix.images(resized(batch.images, side))
            logits = self.network_forward(images, mix.swap_tokens, seed)
        return Logits(*logits, mix, side)

    def loss(self, outputs: Logits, batch: TrainBatch) -> LossParts:
        """Return the losses of the class and, with token labels, of the tokens."""
        criterion = self.criterion(outputs.side)
        return criterion(outputs.classes, outputs.tokens, batch.labels, outputs.mix)

    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the accuracy of a model on the held-out images. Collective: every rank calls this."""
        scores, held_out = ImageScores(self.device), self.images.held_out
        with torch.inference_mode(), self.autocast:
            for batch in self.eval_loader:
                scores.add(batch, model(batch.images))
                beat(len(batch.indices))
        counts, predictions, probabilities = scores.gather(held_out, self.world)
        if self.world.is_rank_zero:
            found = find_confusions(held_out, predictions, probabilities)
            if not self.confusions or found["top1"] > self.confusions["top1"]:
                self.confusions = found
        return counts.metrics()

    def close(self) -> None:
        """End the threads of the evaluation, and close all files."""
        self.eval_loader.close()
        self.images.close()

    def files(self, step: int) -> Mapping[str, str]:
        """Return the confusions of the last evaluation, and forget them: the next one is of a later step."""
        found, self.confusions = self.confusions, {}
        return {CONFUSIONS: json.dumps({"step": step, **found}, indent=1)} if found else {}

    def training_pictures(self, batch: TrainBatch, step: int) -> Mapping[str, Picture]:
        """Return pictures of the first images of a micro-batch, the first of a step."""
        if not PICTURES.has_extra("classification"):
            return {}
        side, classes = self.side(step), self.images.train.classes
        shown = replace(batch, images=resized(batch.images, side))
        draw = PICTURES.find("classification")
        return draw(shown, self.mix(step, 0), self.criterion(side), classes, self.config)


# Draw the first images of a micro-batch (pictures/classification.py).
PICTURES: Registry[Callable[..., Mapping[str, Picture]]] = Registry("pictures", "--images-every")


def build_side(config: Config, world: World, images: int) -> Callable[[int], int]:
    """Return the side of training images as a function of the step."""
    stride, steps = build.spec_of(config.model.model).stride, 0
    if config.model.first_size:
        steps = derive(config, ranks=world.size, images=images).total_steps
    return lambda step: training_side(config.model, stride, step, steps)


def build_mix(config: Config, world: World, side: Callable[[int], int]) -> Callable[[int, int], Mix]:
    """Return MixToken, mixup/CutMix or no mixing as a function of the step and the micro-batch's number."""
    seed, objective, rank = config.run.seed, config.objective, drawing_rank(config, world.rank)
    if objective.mix_token:
        tokens = partial(build.tokens_per_side, config.model.model)
        return lambda step, number: draw_box(seed, step, rank, number, tokens(side(step)))
    if objective.mixup or objective.cutmix:
        return lambda step, number: draw_image_mix(objective, seed, step, rank, number, side(step))
    return lambda step, number: NO_BOX  # noqa: ARG005


def build_loaders(
    config: Config, world: World, images: Images, resources: RankResources
) -> tuple[TrainLoader, Callable[[Catalog], EvalLoader]]:
    """Build this rank's loader for training, and a function that builds one for evaluation on a list."""
    data, spec = config.data, build.spec_of(config.model.model)
    common: dict[str, Any] = {
        "image_size": config.model.img_size,
        "rank": world.rank,
        "size": world.size,
        "device": resources.device,
        "threads": data.workers or resources.threads,
        "normalization": Normalization(*statistics_of_run(data, config.model.model)),
    }
    seed, accumulation = config.run.seed, config.update.accumulation
    train = TrainLoader(images.train, images.label_maps, data, seed=seed, accumulation=accumulation, **common)
    crop, interpolation = data.crop_pct or spec.crop_at(config.model.img_size), spec.interpolation
    return train, partial(EvalLoader, settings=data, crop_pct=crop, interpolation=interpolation, **common)


TASKS: Registry[Task] = Registry("task", "--task")
TASKS.register("classification", Classification())
