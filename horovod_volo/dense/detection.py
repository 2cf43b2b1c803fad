"""Detection: boxes around objects and their classes, with SSD on a ResNet or on VOLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.world import World, WorldSums
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import BoxBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalBatches
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.data.pipeline import Normalization
from horovod_volo.dense.anchors import Anchors, anchor_rule, build_anchors, encode
from horovod_volo.dense.box_evaluation import BoxPredictor, build_eval_loader, measure_detections
from horovod_volo.dense.box_list import BoxList, Split, find_boxes, list_boxes, open_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.box_loss import DetectionLoss, detection_loss
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.ssd import HEADS, SSD, build_ssd, fitted_weights
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.shared_catalog import catalog_folder
from horovod_volo.engine.task import Beat, Learner, Metrics, Network, check_classes, drop_path_seed
from horovod_volo.models.build import check_model
from horovod_volo.models.precision import autocast
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_fitted, read_weights
from horovod_volo.models.weights_header import statistics_of_run
from horovod_volo.monitor.pictures import Picture

_PICTURES = 4  # in TensorBoard


@dataclass(frozen=True)
class BoxImages:
    """The lists of training and held-out images with boxes."""

    train: BoxList
    held_out: BoxList

    def close(self) -> None:
        """Close nothing: files are opened one by one."""

    def describe(self, config: Config) -> str:
        """Describe the images for the banner."""
        rule = anchor_rule(config.model.img_size)
        pairs = zip(rule.sides, rule.anchors_per_position, strict=True)
        anchors = sum(side**2 * shapes for side, shapes in pairs)
        empty = len(self.train.annotations.arrays.image_ids) - len(self.train)
        without = f" ({empty:,} without boxes left out)" if empty else ""
        return (
            f"{len(self.train):,} training{without} and {len(self.held_out):,} held-out images with boxes, "
            f"{len(self.train.classes):,} classes; {anchors:,} anchors"
        )

    def warnings(self, config: Config) -> list[str]:  # noqa: ARG002
        """Return no warnings."""
        return []


@dataclass
class DetectionLearner(Learner[BoxBatch, tuple[Tensor, Tensor]]):
    """The network of a run and its losses, fed by its loaders."""

    config: Config
    world: World
    images: BoxImages
    train_loader: BoxTrainLoader
    eval_loader: EvalBatches
    network: SSD
    anchors: Anchors
    autocast: torch.autocast

    loss_names = DetectionLoss._fields

    def __post_init__(self) -> None:
        self.bad_held_out = self.eval_loader.bad_samples
        self._pictures = EvaluationPictures(_PICTURES if self.world.is_rank_zero else 0)

    def forward(self, batch: BoxBatch, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Return the offsets and the logits of all anchors."""
        seed = drop_path_seed(self.config.run.seed, step, self.world.rank, number)
        with self.autocast:
            values, logits = self.network(batch.images, seed)
        return values, logits

    def loss(self, outputs: tuple[Tensor, Tensor], batch: BoxBatch) -> DetectionLoss:
        """Return the losses of the boxes and of their classes."""
        return detection_loss(*outputs, encode(batch.boxes, batch.classes, self.anchors))

    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the average precision of a model on the held-out images. Collective."""
        return measure_detections(
            model,
            beat,
            loader=self.eval_loader,
            images=self.images.held_out,
            predictor=BoxPredictor(self.config.detection, self.anchors, self.eval_loader.batch_size),
            world=self.world,
            arithmetic=self.autocast,
            pictures=self._pictures,
        )

    def pictures(self) -> Mapping[str, Picture]:
        """Return pictures of the first images of the last evaluation."""
        return self._pictures.latest()

    def close(self) -> None:
        """End the threads of the evaluation."""
        self.eval_loader.close()


class DetectionTask:
    """SSD on boxes."""

    scores = ("ap", "ap50")

    def complete(self, config: Config) -> Config:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)
        return config

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:  # noqa: ARG002
        return config

    def read(self, config: Config, world: World) -> BoxImages:
        cache = catalog_folder(config.data.catalog_dir, config.run.output, world)
        train, held_out = (_shared_list(config, split, cache, world) for split in ("train", "val"))
        return world.run_on_all_ranks(partial(_fitting, config, train, held_out))

    def build(self, config: Config, num_classes: int) -> Network:
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
        heads = _heads(config)
        return Network(
            network,
            heads,
            training_forward=lambda images: network(images, 0),
            load_weights=partial(_load_weights, network, heads, config),
        )

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:
        """Return for how many classes weights are; 0 or less: they are of another network."""
        shapes = anchor_rule(config.model.img_size).anchors_per_position[0]
        return len(weights.get("class_heads.0.bias", ())) // shapes - 1

    def begin(
        self, config: Config, world: World, data: BoxImages, resources: RankResources, network: nn.Module
    ) -> DetectionLearner:
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
        return DetectionLearner(
            config=config,
            world=world,
            images=data,
            train_loader=train_loader,
            eval_loader=eval_loader,
            network=network,
            anchors=anchors,
            autocast=autocast(config.model.precision, device),
        )

    def count(self, config: Config) -> tuple[int, int] | None:
        root = Path(config.data.data_dir)
        if not root.exists():
            return None
        train = _to_learn(config, list_boxes(find_boxes(root, "train"), None))
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"sync_bn": config.model.sync_bn}

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_ap']:.2f} %" if "ema_ap" in metrics else ""
        return (
            f"AP {metrics['ap']:.2f} %, AP at IoU 0.5 {metrics['ap50']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _heads(config: Config) -> tuple[str, ...]:
    maps = len(anchor_rule(config.model.img_size).sides)
    return tuple(f"{head}.{number}" for head in HEADS for number in range(maps))


def _load_weights(network: SSD, heads: tuple[str, ...], config: Config, source: str) -> list[str]:
    weights, which = read_weights(source, use_ema=config.model.use_ema)
    fitted, fresh, messages = fitted_weights(network, weights)
    allowed = config.model.allow_mismatch
    loaded = load_fitted(network, fitted, source, heads=heads, fresh=fresh, allowed=allowed)
    return [*which, *loaded, *messages]


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


TASKS.register("detection", DetectionTask())
