"""Classification: the class of an image, learned from classes or from token labels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from horovod_volo.cluster.world import RankResources, World, WorldSums
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import trains_aux_head, uses_tokens
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.data.augmentation.policy import parse_policy
from horovod_volo.engine.classification_data import (
    Images,
    ReadLists,
    count_images,
    map_geometry,
    read_images,
)
from horovod_volo.engine.classification_learner import ClassificationLearner, build_learner
from horovod_volo.engine.open_settings import (
    choose_settings,
    device_facts,
    fit_to_model,
    with_token_size_warning,
)
from horovod_volo.engine.task import Metrics, Network, Task
from horovod_volo.models.build import (
    build_model,
    check_model,
    our_name,
    spec_of,
    training_forward,
)
from horovod_volo.models.registry import NORMS_OVER_RANKS
from horovod_volo.models.weights import load_weights, read_weights
from horovod_volo.models.weights_header import finetune_warnings
from horovod_volo.objective.loss import LOSSES


class Classification:
    """The task of the published training, on the data sets of a program or on those of the data folder."""

    def __init__(self, lists: ReadLists | None = None) -> None:
        self._lists = lists

    scores = ("top1", "top5")

    def complete(self, config: Config) -> Config:
        check_model(config.model.model, img_size=config.model.img_size, tokens=uses_tokens(config))
        if config.model.sync_bn == "heads":
            raise UserError("--sync-bn heads is for segmentation and detection. Use --sync-bn all, or none.")
        LOSSES.find(config.objective.loss)
        if config.data.aa:
            parse_policy(config.data.aa)
        map_geometry(config)
        fitting = fit_to_model(config)
        return fitting if fitting.chooses_model else with_token_size_warning(fitting)

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:
        return with_token_size_warning(choose_settings(config, images, ranks, device_facts(device)))

    def read(self, config: Config, world: World) -> Images:
        return read_images(config, world, self._lists)

    def count(self, config: Config) -> tuple[int, int] | None:
        return count_images(config)

    def build(self, config: Config, num_classes: int) -> Network:
        settings = config.model
        network = build_model(
            settings.model,
            img_size=settings.img_size,
            num_classes=num_classes,
            drop_path=settings.drop_path,
            grad_checkpoint=settings.grad_checkpoint,
            grad_checkpoint_stages=settings.grad_checkpoint_stages,
            aux_head=trains_aux_head(config),
        )
        if settings.sync_bn == "all":
            NORMS_OVER_RANKS.find("all").synchronize(network)
        forward = training_forward(network)
        return Network(
            network,
            heads=spec_of(settings.model).heads,
            training_forward=lambda images: forward(images, lambda tokens: tokens, 0),
            load_weights=partial(_load_weights, network, config),
        )

    def begin(
        self, config: Config, world: World, data: Images, resources: RankResources, network: nn.Module
    ) -> ClassificationLearner:
        if config.model.sync_bn == "all":
            NORMS_OVER_RANKS.find("all").connect(network, WorldSums(world))
        return build_learner(config, world, data, resources, network)

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
        network, our_name(settings.model), weights, source, allowed=settings.allow_mismatch
    )
    colors = finetune_warnings(source, config.data, settings.model)
    return [*which, *mismatches, *colors]


TASKS: Registry[Task] = Registry("task", "--task")
TASKS.register("classification", Classification())
