"""Segmentation: the class of each pixel, with UperNet on a backbone of classification."""

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
from horovod_volo.engine.task import Metrics, TaskRun, better_value, check_classes, drop_path_seed
from horovod_volo.models.build import check_model
from horovod_volo.models.normalization import statistics_of_run
from horovod_volo.models.precision import autocast
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_fitted, read_weights

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


@dataclass
class SegmentationLosses:
    """The forward pass and the losses of a micro-batch."""

    network: UperNet
    auxiliary_weight: float
    autocast: torch.autocast
    seed: int
    rank: int

    def __call__(self, batch: SceneBatch, step: int, number: int) -> PixelLosses:
        """Return the losses of a micro-batch."""
        seed = drop_path_seed(self.seed, step, self.rank, number)
        with self.autocast:
            logits, auxiliary = self.network.training_logits(batch.images, seed)
        return pixel_losses(logits, auxiliary, batch.masks, self.auxiliary_weight)


class SegmentationTask:
    """UperNet on masks."""

    scores = ("miou", "pixel_accuracy")

    def check(self, config: Config) -> None:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)
        if config.model.img_size % 16:
            raise UserError(f"--img-size must be a multiple of 16, not {config.model.img_size}.")
        longer, shorter = config.segmentation.scene_size
        if not 0 < shorter <= longer:
            raise UserError(f"--scene-size takes the longer side first, not {longer:g} {shorter:g}.")

    def fit_to_model(self, config: Config) -> Config:
        return config

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:  # noqa: ARG002
        return config

    def read(self, config: Config, world: World) -> Scenes:
        return world.run_on_rank_zero(partial(_list, config))

    def heads(self, config: Config) -> tuple[str, ...]:  # noqa: ARG002
        return HEADS

    def build_network(self, config: Config, num_classes: int) -> nn.Module:
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
        return network

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:  # noqa: ARG002
        """Return for how many classes weights are; 0: they are of another network."""
        return max((len(weights.get(f"{head}.bias", ())) for head in HEADS), default=0)

    def load_weights(self, network: nn.Module, config: Config, source: str) -> list[str]:
        assert isinstance(network, UperNet)
        weights, which = read_weights(source, use_ema=config.model.use_ema)
        fitted, fresh, messages = fitted_weights(network, weights)
        allowed = config.model.allow_mismatch
        loaded = load_fitted(network, fitted, source, heads=HEADS, fresh=fresh, allowed=allowed)
        return [*which, *loaded, *messages]

    def training_forward(self, network: nn.Module) -> Callable[[Tensor], Any]:
        assert isinstance(network, UperNet)
        return lambda images: network.training_logits(images, _NONE_SEED)

    def begin(
        self, config: Config, world: World, data: Scenes, resources: RankResources, network: nn.Module
    ) -> TaskRun:
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
        arithmetic = autocast(config.model.precision, device)
        pictures = EvaluationPictures(_PICTURES if world.is_rank_zero else 0)

        def close() -> None:
            eval_loader.close()
            data.close()

        return TaskRun(
            train_loader=train_loader,
            losses=SegmentationLosses(
                network, config.segmentation.auxiliary_weight, arithmetic, config.run.seed, world.rank
            ),
            loss_names=PixelLosses._fields,
            evaluate=partial(
                measure_iou,
                loader=eval_loader,
                scenes=data.held_out,
                predictor=ScenePredictor(
                    config.segmentation,
                    config.model.img_size,
                    normalization,
                    device,
                    batch=config.data.eval_batch_size or config.data.batch_size,
                ),
                world=world,
                device=device,
                arithmetic=arithmetic,
                pictures=pictures,
            ),
            bad_held_out=eval_loader.bad_samples,
            close=close,
            pictures=pictures.latest,
        )

    def warnings(self, config: Config, data: Scenes | None = None) -> list[str]:  # noqa: ARG002
        return []

    def describe(self, config: Config, data: Scenes) -> str:
        longer, shorter = config.segmentation.scene_size
        return (
            f"{len(data.train):,} training and {len(data.held_out):,} held-out images with masks, "
            f"{data.train.layout.name} layout, {len(data.train.classes):,} classes; "
            f"scaled to fit {longer:g} x {shorter:g}"
        )

    def count(self, config: Config) -> tuple[int, int] | None:
        if not Path(config.data.data_dir).exists():
            return None
        train = _list(config).train
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        settings = config.segmentation
        return {"neck": settings.neck, "head_width": settings.head_width, "sync_bn": config.model.sync_bn}

    def score(self, metrics: Metrics) -> float:
        return better_value(metrics, "miou")

    def summary(self, metrics: Metrics) -> str:
        averaged = f", averaged weights {metrics['ema_miou']:.2f} %" if "ema_miou" in metrics else ""
        return (
            f"mean IoU {metrics['miou']:.2f} %, pixel accuracy {metrics['pixel_accuracy']:.2f} %{averaged} "
            f"on {metrics['images']} held-out images"
        )


def _list(config: Config) -> Scenes:
    root = Path(config.data.data_dir)
    train, held_out = open_scenes(root, "train"), open_scenes(root, "val")
    check_classes(config, train, str(root))
    return Scenes(train, held_out)
