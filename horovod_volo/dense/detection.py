"""Detection: boxes around objects and their classes, with SSD on a ResNet or on VOLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from horovod_volo.core.batch import BoxBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.data.pipeline import Normalization
from horovod_volo.dense.anchors import Anchors, anchor_rule, build_anchors, encode
from horovod_volo.dense.box_evaluation import BoxPredictor, build_eval_loader, measure_detections
from horovod_volo.dense.box_list import BoxList, Split, find_boxes, list_boxes, open_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.box_loss import DetectionLoss, detection_loss
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.ssd import HEADS, SSD, build_ssd, fitted_weights
from horovod_volo.engine.shared_catalog import catalog_folder
from horovod_volo.engine.task import Metrics, TaskRun, better_value, check_classes, drop_path_seed
from horovod_volo.models.build import check_model
from horovod_volo.models.normalization import statistics_of_run
from horovod_volo.models.precision import autocast
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_fitted, read_weights

_PICTURES = 4  # in TensorBoard


@dataclass(frozen=True)
class BoxImages:
    """The lists of training and held-out images with boxes."""

    train: BoxList
    held_out: BoxList

    def close(self) -> None:
        """Close nothing: files are opened one by one."""


@dataclass
class DetectionLosses:
    """The forward pass and the losses of a micro-batch."""

    network: SSD
    anchors: Anchors
    autocast: torch.autocast
    seed: int
    rank: int

    def __call__(self, batch: BoxBatch, step: int, number: int) -> DetectionLoss:
        """Return the losses of a micro-batch."""
        seed = drop_path_seed(self.seed, step, self.rank, number)
        with self.autocast:
            values, logits = self.network(batch.images, seed)
        return detection_loss(values, logits, encode(batch.boxes, batch.classes, self.anchors))


class DetectionTask:
    """SSD on boxes."""

    scores = ("ap", "ap50")

    def check(self, config: Config) -> None:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)

    def fit_to_model(self, config: Config) -> Config:
        return config

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:  # noqa: ARG002
        return config

    def read(self, config: Config, world: World) -> BoxImages:
        cache = catalog_folder(config.data.catalog_dir, config.run.output, world)
        train, held_out = (_shared_list(config, split, cache, world) for split in ("train", "val"))
        return world.run_on_all_ranks(partial(_fitting, config, train, held_out))

    def heads(self, config: Config) -> tuple[str, ...]:
        maps = len(anchor_rule(config.model.img_size).sides)
        return tuple(f"{head}.{number}" for head in HEADS for number in range(maps))

    def build_network(self, config: Config, num_classes: int) -> nn.Module:
        model, rule = config.model, anchor_rule(config.model.img_size)
        network = build_ssd(
            model.model,
            num_classes,
            img_size=model.img_size,
            sides=rule.sides,
            anchors_per_position=rule.anchors_per_position,
            drop_path=model.drop_path,
            grad_checkpoint=model.grad_checkpoint,
            stages=model.grad_checkpoint_stages,
        )
        if model.sync_bn != "none":
            synchronize_norms(network if model.sync_bn == "all" else network.extras)
        return network

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:
        """Return for how many classes weights are; 0 or less: they are of another network."""
        shapes = anchor_rule(config.model.img_size).anchors_per_position[0]
        return len(weights.get("class_heads.0.bias", ())) // shapes - 1

    def load_weights(self, network: nn.Module, config: Config, source: str) -> list[str]:
        assert isinstance(network, SSD)
        weights, which = read_weights(source, use_ema=config.model.use_ema)
        fitted, fresh, messages = fitted_weights(network, weights)
        allowed, heads = config.model.allow_mismatch, self.heads(config)
        loaded = load_fitted(network, fitted, source, heads=heads, fresh=fresh, allowed=allowed)
        return [*which, *loaded, *messages]

    def training_forward(self, network: nn.Module) -> Callable[[Tensor], Any]:
        return lambda images: network(images, 0)

    def begin(
        self, config: Config, world: World, data: BoxImages, resources: RankResources, network: nn.Module
    ) -> TaskRun:
        assert isinstance(network, SSD)
        if config.model.sync_bn != "none":
            connect_norms(network, WorldSums(world))
        device = resources.device
        normalization = Normalization(*statistics_of_run(config.data, config.model.model))
        threads = config.data.workers or resources.threads
        anchors = build_anchors(anchor_rule(config.model.img_size), device)
        train_loader = BoxTrainLoader(
            data.train,
            config.data,
            config.detection,
            side=config.model.img_size,
            order=OrderOfRank(config.run.seed, world.rank, world.size, config.update.accumulation),
            device=device,
            threads=threads,
            normalization=normalization,
        )
        eval_loader = build_eval_loader(
            data.held_out,
            config.data,
            side=config.model.img_size,
            rank=world.rank,
            size=world.size,
            device=device,
            threads=threads,
            normalization=normalization,
        )
        arithmetic = autocast(config.model.precision, device)
        pictures = EvaluationPictures(_PICTURES if world.is_rank_zero else 0)
        return TaskRun(
            train_loader=train_loader,
            losses=DetectionLosses(network, anchors, arithmetic, config.run.seed, world.rank),
            loss_names=DetectionLoss._fields,
            evaluate=partial(
                measure_detections,
                loader=eval_loader,
                images=data.held_out,
                predictor=BoxPredictor(config.detection, anchors, eval_loader.batch_size),
                world=world,
                arithmetic=arithmetic,
                pictures=pictures,
            ),
            bad_held_out=eval_loader.bad_samples,
            close=eval_loader.close,
            pictures=pictures.latest,
        )

    def warnings(self, config: Config, data: BoxImages | None = None) -> list[str]:  # noqa: ARG002
        return []

    def describe(self, config: Config, data: BoxImages) -> str:
        rule = anchor_rule(config.model.img_size)
        pairs = zip(rule.sides, rule.anchors_per_position, strict=True)
        anchors = sum(side**2 * shapes for side, shapes in pairs)
        empty = len(data.train.annotations.arrays.image_ids) - len(data.train)
        without = f" ({empty:,} without boxes left out)" if empty else ""
        return (
            f"{len(data.train):,} training{without} and {len(data.held_out):,} held-out images with boxes, "
            f"{len(data.train.classes):,} classes; {anchors:,} anchors"
        )

    def count(self, config: Config) -> tuple[int, int] | None:
        root = Path(config.data.data_dir)
        if not root.exists():
            return None
        train = _to_learn(config, list_boxes(find_boxes(root, "train"), None))
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"sync_bn": config.model.sync_bn}

    def score(self, metrics: Metrics) -> float:
        return better_value(metrics, "ap")

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_ap']:.2f} %" if "ema_ap" in metrics else ""
        return (
            f"AP {metrics['ap']:.2f} %, AP at IoU 0.5 {metrics['ap50']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _shared_list(config: Config, split: Split, cache: Path | None, world: World) -> BoxList:
    """List a split's images on rank 0, and map that list on all ranks. Collective: every rank calls this."""
    files = world.run_on_all_ranks(partial(find_boxes, Path(config.data.data_dir), split))
    built = world.run_on_all_ranks(lambda: list_boxes(files, cache) if world.is_rank_zero else None)
    folder = world.broadcast_object(None if built is None else built.annotations.folder)
    return open_boxes(files, folder) if built is None else built


def _to_learn(config: Config, train: BoxList) -> BoxList:
    return train if config.detection.keep_empty else train.without_empty()


def _fitting(config: Config, train: BoxList, held_out: BoxList) -> BoxImages:
    check_classes(config, train, str(train.files.annotations))
    if (
        train.annotations.category_ids != held_out.annotations.category_ids
        or train.classes != held_out.classes
    ):
        raise UserError(
            f"{train.files.annotations} and {held_out.files.annotations} name other categories. Give both "
            "the same ids and names."
        )
    if not len(train.without_empty()):
        raise UserError(f"{train.files.annotations} has no box to learn. Add boxes.")
    return BoxImages(_to_learn(config, train), held_out)
