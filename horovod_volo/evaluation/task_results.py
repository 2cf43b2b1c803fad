"""What the commands `evaluate` and `export` ask of a task, which registers its evaluation and its export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.names import Registry
from horovod_volo.engine.task import Metrics


class Evaluated(NamedTuple):
    """The result of an evaluation, the same on every rank."""

    metrics: Metrics
    lines: list[str]  # to print
    record: dict[str, Any]  # to write as JSON
    bad_samples: list[str]  # one message for each damaged image


Progress = Callable[[int, int], object]  # given this rank's images that are done, and all of its images
# Evaluates on every image once, given the flags of the command `evaluate`. Whatever can be wrong with them is
# checked before the first image is read. Collective: every rank calls it.
Evaluate = Callable[[Namespace, World, Progress], Evaluated]
EVALUATIONS: Registry[Evaluate] = Registry("evaluation", "--weights of")


@dataclass(frozen=True)
class Trained(ABC):
    """A trained network to export, on the CPU in evaluation mode, of a task that is an extra."""

    network: nn.Module
    config: Config  # of its run
    num_classes: int
    messages: list[str]  # on the weights
    class_names: tuple[str, ...]  # in the order of the logits; none if the weights do not have them
    image_side: int  # in training
    mean: tuple[float, ...]  # of each channel of training pixels from 0 to 1
    std: tuple[float, ...]
    takes_any_size: bool  # images may have any height and width

    @abstractmethod
    def outputs(self) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with the outputs of an evaluation, and their names."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the weights and what is needed to use them."""

    @abstractmethod
    def reloaded_difference(self, folder: Path, images: Tensor) -> float:
        """Return the largest difference of the outputs of a fresh network with the written weights."""


Load = Callable[[str, int, bool], Trained]  # (source, image side or 0, whether averaged weights) -> network
EXPORTS: Registry[Load] = Registry("export", "the export of")  # of tasks that are extras
