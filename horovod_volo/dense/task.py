"""What segmentation and detection share: the lists of a run, its learner, an evaluation, the task itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.schema import Config
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.images.split_folder import Split
from horovod_volo.dense.backbones import fitted_weights
from horovod_volo.dense.dense_batches import DenseBatch, RankContext
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.engine.task import (
    Beat,
    Learner,
    Metrics,
    Network,
    Task,
    TaskData,
    TrainBatches,
    drop_path_seed,
)
from horovod_volo.models.build import check_model
from horovod_volo.models.sync_batch_norm import connect_norms, synchronize_norms
from horovod_volo.models.weights import load_fitted, read_weights
from horovod_volo.monitor.logger import Picture

_PICTURES = 4  # in TensorBoard


@dataclass(frozen=True)
class DenseData(TaskData):
    """The lists of training and held-out images, and what the banner says about them."""

    train: Any
    held_out: Any
    description: str

    def describe(self, config: Config) -> str:  # noqa: ARG002
        return self.description

    def close(self) -> None:
        self.train.close()
        self.held_out.close()


class Views(NamedTuple):
    """The sizes of an image, as factors of --scene-size, whose predictions segmentation averages."""

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False  # each is predicted mirrored too


class Measured(NamedTuple):
    """The result of an evaluation, the same on every rank."""

    metrics: Metrics  # with the numbers of images and of damaged ones, which are left out
    classes: dict[str, float]  # the metric of each class in per cent, where it has one


class Evaluation(ABC):
    """The evaluation of networks on a list of images, each of which one rank predicts."""

    _loader: Any  # of this rank's images
    bad_samples: BadSampleTracker
    folder: Path  # of the images
    options: Mapping[str, Any] = {}  # how images are predicted, for the result
    views = Views()
    predictions: Path | None = None  # folder for them; None: they are not written

    @abstractmethod
    def measure(self, network: nn.Module, beat: Beat, pictures: EvaluationPictures | None = None) -> Measured:
        """Measure a network; draw the first images, and write predictions, if told to. Collective."""

    @abstractmethod
    def rows(self, metrics: Metrics) -> list[tuple[str, str]]:
        """Return metrics in words."""

    def close(self) -> None:
        """End all threads."""
        self._loader.close()


class DenseLearner(Learner[DenseBatch, tuple[Tensor, Tensor]]):
    """The network of a run and its losses, fed by its loaders."""

    loader_of: Callable[[Any, RankContext], TrainBatches]  # of a list of images
    evaluation_of: Callable[[Any, RankContext], Evaluation]

    def __init__(self, context: RankContext, data: DenseData, network: Any) -> None:
        """`training_logits` of the network, given images and a seed, are its outputs in training."""
        self.context, self.network, self._data = context, network, data
        self.train_loader = self.loader_of(data.train, context)
        self.evaluation = self.evaluation_of(data.held_out, context)
        self.bad_held_out = self.evaluation.bad_samples
        self._pictures = EvaluationPictures(_PICTURES if context.world.is_rank_zero else 0)

    def forward(self, batch: DenseBatch, step: int, number: int) -> tuple[Tensor, Tensor]:
        seed = drop_path_seed(self.context.config, step, self.context.world.rank, number)
        with self.context.autocast:
            outputs: tuple[Tensor, Tensor] = self.network.training_logits(batch.images, seed)
        return outputs

    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the metrics of a model on the held-out images. Collective: every rank calls this."""
        return self.evaluation.measure(model, beat, self._pictures).metrics

    def pictures(self) -> Mapping[str, Picture]:
        """Return pictures of the first images of the last evaluation."""
        return {f"image {number:05}": drawn for number, drawn in self._pictures.latest.items()}

    def close(self) -> None:
        self.evaluation.close()
        self._data.close()


class DenseTask(Task, ABC):
    """A task whose networks predict pixels or boxes; its parts are named by the attributes."""

    score_names: Sequence[str]  # of `scores`, for people
    learner: type[DenseLearner]
    list_split: Callable[[Path, Split], Any]  # of a data folder; raises UserError if it has no images

    @abstractmethod
    def list_data(self, config: Config) -> DenseData:
        """List both splits; raise UserError if they do not fit."""

    @abstractmethod
    def build_network(self, config: Config, num_classes: int) -> tuple[Any, tuple[str, ...]]:
        """Build the network with fresh weights; return it and the names of its heads."""

    @abstractmethod
    def classes_in(self, config: Config, weights: Mapping[str, Tensor]) -> int:
        """Return for how many classes weights are; 0 or less: they are of another network."""

    def decoder_messages(self, config: Config) -> list[str]:  # noqa: ARG002
        """Return what the result of an evaluation says about its decoder."""
        return []

    def complete(self, config: Config) -> Config:
        check_model(config.model.model, img_size=config.model.img_size, tokens=False)
        return config

    def read(self, config: Config, world: World) -> DenseData:
        return world.run_on_rank_zero(partial(self.list_data, config))

    def count(self, config: Config) -> tuple[int, int] | None:
        if not Path(config.data.data_dir).exists():
            return None
        train = self.list_data(config).train
        return len(train), len(train.classes)

    def metadata(self, config: Config) -> dict[str, Any]:
        return {"sync_bn": config.model.sync_bn}

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:  # noqa: ARG002
        return config

    def begin(
        self, config: Config, world: World, data: DenseData, resources: RankResources, network: nn.Module
    ) -> DenseLearner:
        if config.model.sync_bn != "none":
            connect_norms(network, world)
        return self.learner(RankContext(config, world, resources), data, network)

    def build(self, config: Config, num_classes: int) -> Network:
        network, heads = self.build_network(config, num_classes)
        if config.model.sync_bn == "all":
            synchronize_norms(network)
        return Network(
            network,
            heads,
            training_forward=lambda images: network.training_logits(images, 0),
            load_weights=partial(load_weights, network, heads, config),
        )

    def summary(self, metrics: Metrics) -> str:
        first, second = (
            f"{name} {metrics[score]:.2f} %"
            for name, score in zip(self.score_names, self.scores, strict=True)
        )
        averaged = f"ema_{self.scores[0]}"
        of_average = f", averaged weights {metrics[averaged]:.2f} %" if averaged in metrics else ""
        return f"{first}, {second}{of_average} on {metrics['images']} held-out images"


def load_weights(network: nn.Module, heads: tuple[str, ...], config: Config, source: str) -> list[str]:
    """Load the weights that a run begins with into its network; return messages."""
    weights, which = read_weights(source, use_ema=config.model.use_ema)
    fitted, fresh, messages = fitted_weights(network, heads, weights)
    allowed = config.model.allow_mismatch
    loaded = load_fitted(network, fitted, source, heads=heads, fresh=fresh, allowed=allowed)
    return [*which, *loaded, *messages]
