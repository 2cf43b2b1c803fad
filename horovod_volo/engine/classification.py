"""Classification: the class of an image, learned from classes or from token labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.cluster.rank_sums import WorldSums
from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import trains_aux_head, uses_tokens
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation.policy import parse_policy
from horovod_volo.data.images.catalog import Catalog, build_catalog, check_same_classes
from horovod_volo.data.images.image_list import ImageList
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.data.pipeline import Normalization
from horovod_volo.engine.accuracy import measure_model
from horovod_volo.engine.classification_losses import (
    ClassificationLosses,
    balance_warnings,
    build_mix,
    class_counts,
    labels_line,
    token_size_warnings,
)
from horovod_volo.engine.confusions import ConfusionRecorder
from horovod_volo.engine.given_data import GivenData
from horovod_volo.engine.open_settings import choose_settings, device_facts, fit_to_model
from horovod_volo.engine.shared_catalog import cache_settings, cache_warnings, catalog_folder, shared_catalog
from horovod_volo.engine.task import Metrics, TaskRun, better_value, check_classes
from horovod_volo.engine.training_pictures import TrainingPictures
from horovod_volo.models.build import (
    build_model,
    check_model,
    our_name,
    spec_of,
    tokens_per_side,
    training_forward,
)
from horovod_volo.models.normalization import finetune_warnings, statistics_of_run
from horovod_volo.models.precision import autocast
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_weights, read_weights
from horovod_volo.objective.loss import (
    LOSSES,
    ClassWeights,
    LossParts,
    build_loss,
    check_threshold,
    read_class_weights,
)
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry
from horovod_volo.token_labels.keys import check_published_keys
from horovod_volo.token_labels.source import LabelSource, map_warnings, open_labels


@dataclass(frozen=True)
class Images:
    """The lists of training and validation images, and the label maps of the training images."""

    train: ImageList
    held_out: ImageList
    label_maps: LabelSource | None
    class_weights: ClassWeights | None = None

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self.held_out.close()
        if self.label_maps is not None:
            self.label_maps.close()


class Classification:
    """The task of the published training, on the data sets of a program or on those of the data folder."""

    def __init__(self, given: GivenData | None = None) -> None:
        self._given = given

    scores = ("top1", "top5")

    def check(self, config: Config) -> None:
        check_model(config.model.model, img_size=config.model.img_size, tokens=uses_tokens(config))
        if config.model.sync_bn == "heads":
            raise UserError("--sync-bn heads is for segmentation and detection. Use --sync-bn all, or none.")
        LOSSES.find(config.objective.loss)
        if config.data.aa:
            parse_policy(config.data.aa)
        _map_geometry(config)

    def fit_to_model(self, config: Config) -> Config:
        return fit_to_model(config)

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:
        return choose_settings(config, images, ranks, device_facts(device))

    def read(self, config: Config, world: World) -> Images:
        train, held_out, label_maps = self._lists(config, world)

        def read_weights_of_classes() -> ClassWeights | None:
            check_threshold(config.objective, len(train.classes))
            return read_class_weights(config.objective.class_weights, train.classes, train.targets)

        return Images(train, held_out, label_maps, world.run_on_all_ranks(read_weights_of_classes))

    def _lists(self, config: Config, world: World) -> tuple[ImageList, ImageList, LabelSource | None]:
        if self._given is not None:
            return (*self._given.lists(config, world), None)
        folder = catalog_folder(config.data.catalog_dir, config.run.output, world)
        train, held_out = (
            shared_catalog(
                config.data.data_dir, split, folder, world, _held_out(config), cache_settings(config.data)
            )
            for split in ("train", "val")
        )
        return train, held_out, world.run_on_all_ranks(partial(_open_label_maps, config, train, held_out))

    def heads(self, config: Config) -> tuple[str, ...]:
        return spec_of(config.model.model).heads

    def build_network(self, config: Config, num_classes: int) -> nn.Module:
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
            synchronize_norms(network)
        return network

    def load_weights(self, network: nn.Module, config: Config, source: str) -> list[str]:
        settings = config.model
        weights, which = read_weights(source, use_ema=settings.use_ema)
        mismatches = load_weights(
            network, our_name(settings.model), weights, source, allowed=settings.allow_mismatch
        )
        colors = finetune_warnings(source, config.data, settings.model)
        return [*which, *mismatches, *colors]

    def training_forward(self, network: nn.Module) -> Callable[[Tensor], Any]:
        forward = training_forward(network)
        return lambda images: forward(images, lambda tokens: tokens, 0)

    def begin(
        self, config: Config, world: World, data: Images, resources: RankResources, network: nn.Module
    ) -> TaskRun:
        if config.model.sync_bn == "all":
            connect_norms(network, WorldSums(world))
        train_loader, eval_loader = build_loaders(config, world, data, resources)
        side = tokens_per_side(config.model.model, config.model.img_size)
        arithmetic = autocast(config.model.precision, resources.device)
        losses = ClassificationLosses(
            forward=training_forward(network),
            loss=build_loss(config.objective, len(data.train.classes), side, data.class_weights),
            mix=build_mix(config, world),
            autocast=arithmetic,
            seed=config.run.seed,
            rank=world.rank,
        )

        confusions = ConfusionRecorder(data.held_out if world.is_rank_zero else None)

        def close() -> None:
            eval_loader.close()
            data.close()

        return TaskRun(
            train_loader=train_loader,
            losses=losses,
            loss_names=LossParts._fields,
            evaluate=partial(
                measure_model,
                loader=eval_loader,
                catalog=data.held_out,
                world=world,
                device=resources.device,
                arithmetic=arithmetic,
                confusions=confusions,
            ),
            bad_held_out=eval_loader.bad_samples,
            close=close,
            pictures=confusions.pictures,
            files=confusions.files,
            classes=data.train.targets if config.data.balance else None,
            training_pictures=TrainingPictures(network, losses, data.train.classes, config),
        )

    def warnings(self, config: Config, data: Images | None = None) -> list[str]:
        found = token_size_warnings(config)
        if data is not None:
            found += balance_warnings(config, data.train)
            found += cache_warnings(config.data, data.train)
        if data is not None and data.label_maps is not None:
            found += map_warnings(config.objective.token_label_data, data.label_maps)
        return found

    def describe(self, config: Config, data: Images) -> str:
        source = data.held_out.source
        is_share = source == data.train.source
        where = f"{100 * config.data.val_share:g} % of each class" if is_share else Path(source).name
        return (
            f"{len(data.train):,} training and {len(data.held_out):,} held-out images ({where}), "
            f"{class_counts(config, data.train)}; {labels_line(config, data.label_maps)}"
        )

    def count(self, config: Config) -> tuple[int, int] | None:
        if not Path(config.data.data_dir).exists():
            return None
        train = build_catalog(config.data.data_dir, "train", None, _held_out(config))
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"aux_head": trains_aux_head(config)}

    def score(self, metrics: Metrics) -> float:
        return better_value(metrics, "top1")

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_top1']:.2f} %" if "ema_top1" in metrics else ""
        return (
            f"top-1 {metrics['top1']:.2f} %, top-5 {metrics['top5']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _held_out(config: Config) -> HeldOut:
    return HeldOut(config.data.val_split, config.data.val_share, config.run.seed)


def _map_geometry(config: Config) -> MapGeometry | None:
    """Return the part of their images that the settings say label maps cover; None: as recorded."""
    if config.objective.label_geometry == "reference":
        return WHOLE
    geometry = config.objective.map_geometry
    return MapGeometry.parse(geometry) if geometry else None


def _open_label_maps(config: Config, train: Catalog, held_out: Catalog) -> LabelSource | None:
    """Check the classes of the images against each other and the settings; open the label maps, if any."""
    check_same_classes(train, held_out)
    check_classes(config, train, train.source)
    if not config.objective.token_label_data:
        return None
    cache = train.path.parent if train.path else None
    label_maps = open_labels(config.objective.token_label_data, train, cache, _map_geometry(config))
    if held_out.source == train.source and not label_maps.generated:  # with --val-share
        check_published_keys(train, held_out)
    return label_maps


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
