"""The seam between engine and task. The engine trains, exchanges, saves, resumes and logs; a task brings
data, a network, the losses of a micro-batch and an evaluation.

`Task` is a task by name. From the settings of a run it reads the data and builds the network, and then its
part of the run on one rank, `TaskRun`. docs/tasks.md says what another task would bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, random_bits
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.monitor.pictures import Picture

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


class TrainBatches(Protocol):
    """This rank's micro-batches, of any epoch, from any step on: a pure function of them and of the seed."""

    waited_seconds: float
    bad_samples: BadSampleTracker

    def batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        """Yield the micro-batches of an epoch from `first_step` on."""

    def prepare_next(self) -> None:
        """Prepare the next one, while the caller need not wait for it."""

    def close(self) -> None:
        """End all threads."""


class Samples(Protocol):
    """The list of a split's samples."""

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes."""

    @property
    def digest(self) -> str:
        """Return a checksum of the list, which a resumed run must share."""

    def __len__(self) -> int: ...


class TaskData(Protocol):
    """The lists of training and held-out samples, and what belongs to them."""

    @property
    def train(self) -> Samples:
        """Return the training samples."""

    @property
    def held_out(self) -> Samples:
        """Return the samples of the evaluation."""

    def close(self) -> None:
        """Close all files."""


def no_pictures(batch: Any, step: int) -> Mapping[str, Picture]:  # noqa: ARG001
    """Return no pictures of a micro-batch."""
    return {}


@dataclass
class TaskRun:
    """A task's part of a run on one rank."""

    train_loader: TrainBatches
    # (micro-batch, step, its number in the step) -> its losses: a named tuple of scalars, `total` the first.
    losses: Callable[[Any, int, int], Any]
    loss_names: tuple[str, ...]
    # Evaluates a model on the held-out samples: the same metrics on every rank. Collective.
    evaluate: Callable[[nn.Module, Beat], Metrics]
    bad_held_out: BadSampleTracker
    close: Callable[[], None]
    classes: NDArray[np.int32] | None = None  # of the training samples, if --balance orders by them
    pictures: Callable[[], Mapping[str, Picture]] = dict  # of the last evaluation, by name
    # Text files for the run folder, by name, of the last evaluation, which was at this step.
    files: Callable[[int], Mapping[str, str]] = lambda step: {}  # noqa: ARG005
    # (micro-batch, step) -> pictures of it by name. Changes nothing, and is called on one rank alone.
    training_pictures: Callable[[Any, int], Mapping[str, Picture]] = no_pictures


class Task(Protocol):
    """What is learned."""

    @property
    def scores(self) -> Sequence[str]:
        """Return the metrics of an evaluation that tell how good a network is, the most important first."""

    def check(self, config: Config) -> None:
        """Raise UserError for settings that are wrong with any data."""

    def fit_to_model(self, config: Config) -> Config:
        """Return the settings, with those that no flag and no recipe set as the model needs them."""

    def choose(self, config: Config, images: int, ranks: int, device: torch.device) -> Config:
        """Return the settings, with those that were left open chosen for the images and the device."""

    def read(self, config: Config, world: World) -> TaskData:
        """List the samples; raise UserError if they do not fit. Collective: every rank calls this."""

    def heads(self, config: Config) -> tuple[str, ...]:
        """Return the prefixes of the names of the layers that give the logits."""

    def build_network(self, config: Config, num_classes: int) -> nn.Module:
        """Build the network with fresh weights from torch's random state."""

    def load_weights(self, network: nn.Module, config: Config, source: str) -> list[str]:
        """Load the weights to begin with; return what to tell about them."""

    def training_forward(self, network: nn.Module) -> Callable[[Tensor], Any]:
        """Return the forward pass of training, to measure it."""

    def begin(
        self, config: Config, world: World, data: Any, resources: RankResources, network: nn.Module
    ) -> TaskRun:
        """Build the loaders, the losses and the evaluation of a run."""

    def warnings(self, config: Config, data: Any | None = None) -> list[str]:
        """Return warnings about settings, and about data if there are any."""

    def describe(self, config: Config, data: Any) -> str:
        """Describe the samples and what is learned from them, for the banner."""

    def count(self, config: Config) -> tuple[int, int] | None:
        """Return the numbers of training samples and classes; None if the data is on another machine."""

    def metadata(self, config: Config) -> dict[str, Any]:
        """Return settings that a resumed run must share, besides those of all tasks."""

    def score(self, metrics: Metrics) -> float:
        """Return what the best weights have most of; raise KeyError, TypeError or ValueError without it."""

    def summary(self, metrics: Metrics) -> str:
        """Describe an evaluation in one line."""


def drop_path_seed(seed: int, step: int, rank: int, number: int) -> int:
    """Return 64 random bits for what a network draws in a micro-batch, `number` in its step."""
    return random_bits(Purpose.DROP_PATH, seed, step, rank, number)


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
