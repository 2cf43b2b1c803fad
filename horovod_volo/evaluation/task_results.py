"""What the commands `evaluate` and `export` need of a task that is an extra; the extra registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.names import Registry
from horovod_volo.engine.task import Metrics


class Evaluated(Protocol):
    """The result of an evaluation by the command line, the same on every rank."""

    @property
    def metrics(self) -> Metrics:
        """Return the metrics."""

    @property
    def bad_samples(self) -> list[str]:
        """Return one message for each damaged image."""

    def text(self, worst: int) -> list[str]:
        """Return the result as lines, with so many classes of lowest value."""

    def record(self, ranks: int) -> dict[str, Any]:
        """Return the result as plain values."""


# (options of the command line, world, told (images of this rank that are done, all of them)) -> result.
Evaluate = Callable[[Mapping[str, Any], World, Callable[[int, int], object]], Evaluated]
EVALUATIONS: Registry[Evaluate] = Registry("evaluation", "--weights of")  # of tasks that are extras


class Trained(Protocol):
    """A trained network to export, on the CPU in evaluation mode, of a task that is an extra."""

    @property
    def config(self) -> Config:
        """Return the settings of its run."""

    @property
    def messages(self) -> list[str]:
        """Return what to tell about the weights."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes; none if the weights do not have them."""

    @property
    def image_side(self) -> int:
        """Return the side of the images in training."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Return the mean of each channel of training pixels from 0 to 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Return their standard deviation."""

    @property
    def takes_any_size(self) -> bool:
        """Return whether images may have any height and width."""

    def outputs(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with the outputs of an evaluation, and their names."""

    def write(self, folder: Path) -> None:
        """Write the weights and what is needed to use them."""

    def reloaded_difference(self, folder: Path, images: Tensor) -> float:
        """Return the largest difference of the outputs of a fresh network with the written weights."""


Load = Callable[[str, int, bool], Trained]  # (source, image side or 0, whether averaged weights) -> network
EXPORTS: Registry[Load] = Registry("export", "the export of")
