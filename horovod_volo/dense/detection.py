"""Detection: boxes around objects and their classes, with SSD on a ResNet or on VOLO."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import decoder_messages
from horovod_volo.dense.anchors import DetectionLoss, anchor_rule, build_anchors, detection_loss, encode
from horovod_volo.dense.box_evaluation import BoxEvaluation
from horovod_volo.dense.box_list import find_boxes, list_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.dense_batches import DenseBatch, RankContext
from horovod_volo.dense.ssd import HEADS, SSD, build_ssd
from horovod_volo.dense.task import DenseData, DenseLearner, DenseTask
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.task import check_classes
from horovod_volo.models.sync_batch_norm import synchronize_norms


class DetectionLearner(DenseLearner):
    """SSD and its losses."""

    loader_of, evaluation_of, loss_names = BoxTrainLoader, BoxEvaluation, DetectionLoss._fields

    def __init__(self, context: RankContext, data: DenseData, network: Any) -> None:
        super().__init__(context, data, network)
        self._anchors = build_anchors(anchor_rule(context.config.model.img_size), context.device)

    def loss(self, outputs: tuple[Tensor, Tensor], batch: DenseBatch) -> DetectionLoss:
        boxes, classes = batch.targets
        return detection_loss(*outputs, encode(boxes, classes, self._anchors))


class DetectionTask(DenseTask):
    scores = ("ap", "ap50")
    score_names = ("AP", "AP at IoU 0.5")
    learner = DetectionLearner
    list_split = staticmethod(list_boxes)

    def decoder_messages(self, config: Config) -> list[str]:
        return decoder_messages(config.data.image_decoder)

    def read(self, config: Config, world: World) -> DenseData:
        for split in ("train", "val"):  # on each host
            world.run_on_all_ranks(partial(find_boxes, Path(config.data.data_dir), split))
        return super().read(config, world)

    def list_data(self, config: Config) -> DenseData:
        root = Path(config.data.data_dir)
        train, held_out = list_boxes(root, "train"), list_boxes(root, "val")
        check_classes(config, train, str(train.files.annotations))
        first, other = (
            (each.annotations.category_ids, each.annotations.class_names) for each in (train, held_out)
        )
        if first != other:
            raise UserError(
                f"{train.files.annotations} and {held_out.files.annotations} name other categories. Give "
                "both the same ids and names."
            )
        to_learn = train.without_empty()
        if not len(to_learn):
            raise UserError(f"{train.files.annotations} has no box to learn. Add boxes.")
        rule = anchor_rule(config.model.img_size)
        pairs = zip(rule.sides, rule.anchors_per_position, strict=True)
        empty = len(train) - len(to_learn)
        without = f" ({empty:,} without boxes left out)" if empty else ""
        return DenseData(
            to_learn,
            held_out,
            f"{len(to_learn):,} training{without} and {len(held_out):,} held-out images with boxes, "
            f"{len(train.classes):,} classes; {sum(side**2 * shapes for side, shapes in pairs):,} anchors",
        )

    def build_network(self, config: Config, num_classes: int) -> tuple[SSD, tuple[str, ...]]:
        network = build_ssd(config.model, num_classes)
        if config.model.sync_bn == "heads":
            synchronize_norms(network.extras)
        return network, tuple(f"{each}.{n}" for each in HEADS for n in range(len(network.box_heads)))

    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:
        shapes = anchor_rule(config.model.img_size).anchors_per_position[0]
        return len(weights.get("class_heads.0.bias", ())) // shapes - 1


TASKS.register("detection", DetectionTask())
