"""Segmentation: the class of each pixel, with UperNet on a backbone of classification."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.dense.dense_batches import DenseBatch
from horovod_volo.dense.mean_iou import SceneEvaluation
from horovod_volo.dense.scene_loader import SceneTrainLoader
from horovod_volo.dense.scene_shards import open_scenes
from horovod_volo.dense.task import DenseData, DenseLearner, DenseTask
from horovod_volo.dense.upernet import HEADS, PixelLosses, UperNet, pixel_losses
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.task import check_classes


class SegmentationLearner(DenseLearner):
    """UperNet and its losses."""

    loader_of, evaluation_of, loss_names = SceneTrainLoader, SceneEvaluation, PixelLosses._fields

    def loss(self, outputs: tuple[Tensor, Tensor], batch: DenseBatch) -> PixelLosses:
        return pixel_losses(*outputs, *batch.targets)


class SegmentationTask(DenseTask):
    scores = ("miou", "pixel_accuracy")
    score_names = ("mean IoU", "pixel accuracy")
    learner = SegmentationLearner
    list_split = staticmethod(open_scenes)

    def complete(self, config: Config) -> Config:
        super().complete(config)
        if config.model.img_size % 16:
            raise UserError(f"--img-size must be a multiple of 16, not {config.model.img_size}.")
        longer, shorter = config.segmentation.scene_size
        if not 0 < shorter <= longer:
            raise UserError(f"--scene-size takes the longer side first, not {longer:g} {shorter:g}.")
        return config

    def list_data(self, config: Config) -> DenseData:
        root = Path(config.data.data_dir)
        train, held_out = open_scenes(root, "train"), open_scenes(root, "val")
        check_classes(config, train, str(root))
        longer, shorter = config.segmentation.scene_size
        return DenseData(
            train,
            held_out,
            f"{len(train):,} training and {len(held_out):,} held-out images with masks, "
            f"{train.layout.name} layout, {len(train.classes):,} classes; "
            f"scaled to fit {longer:g} x {shorter:g}",
        )

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"head_width": config.segmentation.head_width, **super().metadata(config)}

    def build_network(self, config: Config, num_classes: int) -> tuple[UperNet, tuple[str, ...]]:
        return UperNet(config.model, config.segmentation, num_classes), HEADS

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:  # noqa: ARG002
        return max((len(weights.get(f"{head}.bias", ())) for head in HEADS), default=0)


TASKS.register("segmentation", SegmentationTask())
