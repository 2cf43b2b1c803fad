"""Segmentation: the class of each pixel, with UperNet on a backbone of classification."""

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
from horovod_volo.core.batch import SceneBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.data.pipeline import Normalization
from horovod_volo.dense.mean_iou import ScenePredictor, measure_iou
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.pixel_loss import PixelLosses, pixel_losses
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.dense.scene_loader import SceneEvalLoader, SceneTrainLoader
from horovod_volo.dense.scene_shards import open_scenes
from horovod_volo.dense.upernet import HEADS, UperNet, fitted_weights
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.task import Beat, Learner, Metrics, Network, check_classes, drop_path_seed
from horovod_volo.models.build import check_model
from horovod_volo.models.precision import autocast
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_fitted, read_weights
from horovod_volo.models.weights_header import statistics_of_run
from horovod_volo.monitor.pictures import Picture

_NONE_SEED = 0
_PICTURES = 4  # in TensorBoard


@dataclass(frozen=True)
class Scenes:
    """The lists of training and held-out images with masks."""

    train: SceneList
    held_out: SceneList

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self.held_out.close()

    def describe(self, config: Config) -> str:
        """Describe the images for the banner."""
        longer, shorter = config.segmentation.scene_size
        return (
            f"{len(self.train):,} training and {len(self.held_out):,} held-out images with masks, "
            f"{self.train.layout.name} layout, {len(self.train.classes):,} classes; "
            f"scaled to fit {longer:g} x {shorter:g}"
        )

    def warnings(self, config: Config) -> list[str]:  # noqa: ARG002
        """Return no warnings."""
        return []


@dataclass
class SegmentationLearner(Learner[SceneBatch, tuple[Tensor, Tensor]]):
    """The network of a run and its losses, fed by its loaders."""

    config: Config
    world: World
    device: torch.device
    scenes: Scenes
    train_loader: SceneTrainLoader
    eval_loader: SceneEvalLoader
    network: UperNet
    predictor: ScenePredictor
    autocast: torch.autocast

    loss_names = PixelLosses._fields

    def __post_init__(self) -> None:
        self.bad_held_out = self.eval_loader.bad_samples
        self._pictures = EvaluationPictures(_PICTURES if self.world.is_rank_zero else 0)

    def forward(self, batch: SceneBatch, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the pixels, and those of the auxiliary head."""
        seed = drop_path_seed(self.config.run.seed, step, self.world.rank, number)
        with self.autocast:
            return self.network.training_logits(batch.images, seed)

    def loss(self, outputs: tuple[Tensor, Tensor], batch: SceneBatch) -> PixelLosses:
        """Return the losses of both heads."""
        return pixel_losses(*outputs, batch.masks, self.config.segmentation.auxiliary_weight)

    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the mean IoU of a model on the held-out images. Collective: every rank calls this."""
        return measure_iou(
            model,
            beat,
            loader=self.eval_loader,
            scenes=self.scenes.held_out,
            predictor=self.predictor,
            world=self.world,
            device=self.device,
            arithmetic=self.autocast,
            pictures=self._pictures,
        )

    def pictures(self) -> Mapping[str, Picture]:
        """Return pictures of the first images of the last evaluation."""
        return self._pictures.latest()

    def close(self) -> None:
        """End the threads of the evaluation, and close all files."""
        self.eval_loader.close()
        self.scenes.close()


class SegmentationTask:
    """UperNet on masks."""

    scores = ("miou", "pixel_accuracy")

    def complete(self, config: Config) -> Config:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)
        if config.model.img_size % 16:
            raise UserError(f"--img-size must be a multiple of 16, not {config.model.img_size}.")
        longer, shorter = config.segmentation.scene_size
        if not 0 < shorter <= longer:
            raise UserError(f"--scene-size takes the longer side first, not {longer:g} {shorter:g}.")
        return config

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:  # noqa: ARG002
        return config

    def read(self, config: Config, world: World) -> Scenes:
        return world.run_on_rank_zero(partial(_list, config))

    def build(self, config: Config, num_classes: int) -> Network:
        model, settings = config.model, config.segmentation
        network = UperNet(
            model.model,
            img_size=model.img_size,
            num_classes=num_classes,
            drop_path=model.drop_path,
            neck=settings.neck,
            width=settings.head_width,
            auxiliary_width=settings.auxiliary_width,
            grad_checkpoint=model.grad_checkpoint,
            stages=model.grad_checkpoint_stages,
        )
        if model.sync_bn == "all":
            synchronize_norms(network)
        return Network(
            network,
            HEADS,
            training_forward=lambda images: network.training_logits(images, _NONE_SEED),
            load_weights=partial(_load_weights, network, config),
        )

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:  # noqa: ARG002
        """Return for how many classes weights are; 0: they are of another network."""
        return max((len(weights.get(f"{head}.bias", ())) for head in HEADS), default=0)

    def begin(
        self, config: Config, world: World, data: Scenes, resources: RankResources, network: nn.Module
    ) -> SegmentationLearner:
        assert isinstance(network, UperNet)
        if config.model.sync_bn != "none":
            connect_norms(network, WorldSums(world))
        device = resources.device
        normalization = Normalization(*statistics_of_run(config.data, config.model.model))
        threads = config.data.workers or resources.threads
        train_loader = SceneTrainLoader(
            data.train,
            config.data,
            config.segmentation,
            side=config.model.img_size,
            order=OrderOfRank(config.run.seed, world.rank, world.size, config.update.accumulation),
            device=device,
            threads=threads,
            normalization=normalization,
        )
        eval_loader = SceneEvalLoader(
            data.held_out, config.data, rank=world.rank, size=world.size, threads=threads
        )
        return SegmentationLearner(
            config=config,
            world=world,
            device=device,
            scenes=data,
            train_loader=train_loader,
            eval_loader=eval_loader,
            network=network,
            predictor=ScenePredictor(
                config.segmentation,
                config.model.img_size,
                normalization,
                device,
                batch=config.data.eval_batch_size or config.data.batch_size,
            ),
            autocast=autocast(config.model.precision, device),
        )

    def count(self, config: Config) -> tuple[int, int] | None:
        if not Path(config.data.data_dir).exists():
            return None
        train = _list(config).train
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        settings = config.segmentation
        return {"neck": settings.neck, "head_width": settings.head_width, "sync_bn": config.model.sync_bn}

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_miou']:.2f} %" if "ema_miou" in metrics else ""
        return (
            f"mean IoU {metrics['miou']:.2f} %, pixel accuracy {metrics['pixel_accuracy']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _load_weights(network: UperNet, config: Config, source: str) -> list[str]:
    weights, which = read_weights(source, use_ema=config.model.use_ema)
    fitted, fresh, messages = fitted_weights(network, weights)
    allowed = config.model.allow_mismatch
    loaded = load_fitted(network, fitted, source, heads=HEADS, fresh=fresh, allowed=allowed)
    return [*which, *loaded, *messages]


def _list(config: Config) -> Scenes:
    root = Path(config.data.data_dir)
    train, held_out = open_scenes(root, "train"), open_scenes(root, "val")
    check_classes(config, train, str(root))
    return Scenes(train, held_out)


TASKS.register("segmentation", SegmentationTask())
