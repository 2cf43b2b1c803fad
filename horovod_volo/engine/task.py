"""The seam between engine and task. The engine trains, exchanges, saves, resumes and logs; a task brings
data, a network, the losses of a micro-batch and an evaluation.

`Task` is a task by name. From the settings of a run it reads the data and builds the network, and then its
part of the run on one rank, a `Learner`. docs/CONTRIBUTING.md says what another task would bring.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.derived import drawing_rank
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, random_bits
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.ordered_batches import OrderedBatches
from horovod_volo.monitor.logger import Picture

MicroBatch = TypeVar("MicroBatch")
Outputs = TypeVar("Outputs")  # of the network for a micro-batch
Metrics = dict[str, float | int]
Beat = Callable[[int], object]  # told that so many images were evaluated: the rank is alive


class Batch(Protocol):
    """One micro-batch, as far as the engine knows it."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """Return the samples in it, (batch,)."""

    @property
    def drawn(self) -> NDArray[np.int64]:
        """Return the samples that the epoch's order has here, (batch,); damaged ones were replaced."""


# This rank's micro-batches, of any epoch, from any step on: a pure function of them and of the seed.
TrainBatches = OrderedBatches[Any, Any]


class Samples(Protocol):
    """The list of a split's samples."""

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes."""

    @property
    def digest(self) -> str:
        """Return a checksum of the list, which a resumed run must share."""

    def __len__(self) -> int: ...


class TaskData(ABC):
    """The lists of training and held-out samples, and what belongs to them."""

    train: Samples
    held_out: Samples

    @abstractmethod
    def describe(self, config: Config) -> str:
        """Describe the samples and what is learned from them, for the banner."""

    def warnings(self, config: Config) -> list[str]:  # noqa: ARG002
        """Return warnings about the data."""
        return []


class Losses(Protocol):
    """The losses of a micro-batch: a named tuple of scalars, whose first one is minimised."""

    @property
    def total(self) -> Tensor:
        """Return the one that is minimised."""

    def __iter__(self) -> Iterator[Tensor]: ...


class Learner(ABC, Generic[MicroBatch, Outputs]):
    """A task's part of a run on one rank: its batches, its forward pass, its losses and its evaluation."""

    train_loader: TrainBatches
    loss_names: tuple[str, ...]
    bad_held_out: BadSampleTracker

    @abstractmethod
    def forward(self, batch: MicroBatch, step: int, number: int) -> Outputs:
        """Return what the network makes of a micro-batch, `number` in its step."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: MicroBatch) -> Losses:
        """Return the losses of these outputs."""

    @abstractmethod
    def evaluate(self, model: nn.Module, beat: Beat) -> Metrics:
        """Return the metrics of a model on the held-out samples, the same on every rank. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Close the files of the data, and end the threads of the evaluation."""

    def pictures(self) -> Mapping[str, Picture]:
        """Return pictures of the last evaluation by name."""
        return {}

    def files(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """Return text files for the run folder, by name, of the last evaluation, which was at this step."""
        return {}

    def training_pictures(self, batch: MicroBatch, step: int) -> Mapping[str, Picture]:  # noqa: ARG002
        """Return pictures of a micro-batch by name. Changes nothing, and is called on one rank alone."""
        return {}


@dataclass(frozen=True)
class Network:
    """A network of a task, on the device where torch builds."""

    module: nn.Module
    heads: tuple[str, ...]  # prefixes of the names of the layers that give the logits
    training_forward: Callable[[Tensor], object]  # images -> outputs, to measure the forward of training
    load_weights: Callable[[str], list[str]]  # loads those to begin with; returns what to tell about them


class Task(Protocol):
    """What is learned."""

    @property
    def scores(self) -> Sequence[str]:
        """Return the metrics of an evaluation that tell how good a network is, the most important first."""

    def complete(self, config: Config) -> Config:
        """Return the settings with those that the model needs; raise UserError if some are wrong."""

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:
        """Return the settings, with those that were left open chosen for the images and the device."""

    def read(self, config: Config, world: World) -> TaskData:
        """List the samples; raise UserError if they do not fit. Collective: every rank calls this."""

    def count(self, config: Config) -> tuple[int, int] | None:
        """Return the numbers of training samples and classes; None if the data is on another machine."""

    def build(self, config: Config, num_classes: int) -> Network:
        """Build the network with fresh weights from torch's random state."""

    def begin(
        self, config: Config, world: World, data: Any, resources: RankResources, network: nn.Module
    ) -> Learner[Any, Any]:
        """Build the loaders, the losses and the evaluation of a run."""

    def metadata(self, config: Config) -> dict[str, Any]:
        """Return settings that a resumed run must share, besides those of all tasks."""

    def summary(self, metrics: Metrics) -> str:
        """Describe an evaluation in one line."""


def drop_path_seed(config: Config, step: int, rank: int, number: int) -> int:
    """Return 64 random bits for what a network draws in a micro-batch, `number` in its step."""
    return random_bits(Purpose.DROP_PATH, config.run.seed, step, drawing_rank(config, rank), number)


def better_value(metrics: Metrics, name: str) -> float:
    """Return the better value of the raw and of the averaged weights."""
    return float(max(metrics[name], metrics.get(f"ema_{name}", 0.0)))


def check_classes(config: Config, train: Samples, source: str) -> None:
    """Raise UserError if --num-classes is not the number of classes."""
    if config.model.num_classes not in (0, len(train.classes)):
        raise UserError(
            f"--num-classes is {config.model.num_classes}, but {source} has "
            f"{len(train.classes)} classes. Drop --num-classes."
        )
