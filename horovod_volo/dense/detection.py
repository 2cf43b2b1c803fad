"""Detection: boxes around objects and their classes, with SSD on a ResNet or on VOLO."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.task_settings import Detection
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import decoder_messages
from horovod_volo.data.images.split_folder import Split
from horovod_volo.dense.anchors import DetectionLoss, anchor_rule, build_anchors, detection_loss, encode
from horovod_volo.dense.box_evaluation import BoxEvaluation
from horovod_volo.dense.box_list import BoxList, find_boxes, list_boxes, open_boxes
from horovod_volo.dense.box_loader import BoxBatch, BoxTrainLoader
from horovod_volo.dense.ssd import HEADS, build_ssd, fitted_weights
from horovod_volo.dense.task import DenseData, DenseLearner, DenseTask, RankContext, load_weights
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.classification_data import catalog_folder
from horovod_volo.engine.task import Network, check_classes
from horovod_volo.models.build import check_model
from horovod_volo.models.sync_batch_norm import synchronize_norms


class DetectionLearner(DenseLearner[BoxBatch]):
    """SSD and its losses."""

    loss_names = DetectionLoss._fields

    def __init__(self, config: Config, context: RankContext, *parts: Any) -> None:
        super().__init__(config, context, *parts)
        self._anchors = build_anchors(anchor_rule(config.model.img_size), context.device)

    def forward(self, batch: BoxBatch, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Return the offsets and the logits of all anchors."""
        with self.context.autocast:
            values, logits = self.network(batch.images, self.seed(step, number))
        return values, logits

    def loss(self, outputs: tuple[Tensor, Tensor], batch: BoxBatch) -> DetectionLoss:
        """Return the losses of the boxes and of their classes."""
        return detection_loss(*outputs, encode(batch.boxes, batch.classes, self._anchors))


class DetectionTask(DenseTask):
    """SSD on boxes."""

    scores = ("ap", "ap50")
    score_names = ("AP", "AP at IoU 0.5")
    train_batches, evaluation, learner = BoxTrainLoader, BoxEvaluation, DetectionLearner

    def settings(self, config: Config) -> Detection:
        return config.detection

    def complete(self, config: Config) -> Config:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)
        return config

    def read(self, config: Config, world: World) -> DenseData:
        cache = catalog_folder(config.data.catalog_dir, config.run.output, world)
        train, held_out = (_shared_list(config, split, cache, world) for split in ("train", "val"))
        return world.run_on_all_ranks(partial(_fitting, config, train, held_out))

    def count(self, config: Config) -> tuple[int, int] | None:
        root = Path(config.data.data_dir)
        if not root.exists():
            return None
        train = _to_learn(config, self.list_split(root, "train"))
        return len(train), len(train.classes)

    def list_split(self, root: Path, split: Split) -> BoxList:
        return list_boxes(find_boxes(root, split), None)

    def decoder_messages(self, config: Config) -> list[str]:
        return decoder_messages(config.data.image_decoder)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"sync_bn": config.model.sync_bn}

    def build(self, config: Config, num_classes: int) -> Network:
        network, norms = build_ssd(config.model, num_classes), config.model.sync_bn
        if norms != "none":
            synchronize_norms(network if norms == "all" else network.extras)
        heads = tuple(f"{head}.{number}" for head in HEADS for number in range(len(network.box_heads)))
        return Network(
            network,
            heads,
            training_forward=lambda images: network(images, 0),
            load_weights=partial(load_weights, network, fitted_weights, heads, config),
        )

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:
        shapes = anchor_rule(config.model.img_size).anchors_per_position[0]
        return len(weights.get("class_heads.0.bias", ())) // shapes - 1


def _shared_list(config: Config, split: Split, cache: Path | None, world: World) -> BoxList:
    """List a split's images on rank 0, and map that list on all ranks. Collective: every rank calls this."""
    files = world.run_on_all_ranks(partial(find_boxes, Path(config.data.data_dir), split))
    built = world.run_on_all_ranks(lambda: list_boxes(files, cache) if world.is_rank_zero else None)
    folder = world.broadcast_object(None if built is None else built.annotations.folder)
    return open_boxes(files, folder) if built is None else built


def _to_learn(config: Config, train: BoxList) -> BoxList:
    return train if config.detection.keep_empty else train.without_empty()


def _fitting(config: Config, train: BoxList, held_out: BoxList) -> DenseData:
    check_classes(config, train, str(train.files.annotations))
    first, other = ((each.annotations.category_ids, each.annotations.classes) for each in (train, held_out))
    if first != other:
        raise UserError(
            f"{train.files.annotations} and {held_out.files.annotations} name other categories. Give both "
            "the same ids and names."
        )
    if not len(train.without_empty()):
        raise UserError(f"{train.files.annotations} has no box to learn. Add boxes.")
    to_learn, rule = _to_learn(config, train), anchor_rule(config.model.img_size)
    pairs = zip(rule.sides, rule.anchors_per_position, strict=True)
    anchors = sum(side**2 * shapes for side, shapes in pairs)
    empty = len(train) - len(to_learn)
    without = f" ({empty:,} without boxes left out)" if empty else ""
    return DenseData(
        to_learn,
        held_out,
        f"{len(to_learn):,} training{without} and {len(held_out):,} held-out images with boxes, "
        f"{len(train.classes):,} classes; {anchors:,} anchors",
    )


TASKS.register("detection", DetectionTask())
