"""What the engine logs to: a run's logger on rank 0, and on the other ranks one that writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.monitor.event_records import EncodedPicture, HparamValue
from horovod_volo.monitor.progress import Values


@dataclass(frozen=True)
class RunDescription:
    """What TensorBoard shows of a run besides its curves and pictures."""

    texts: Mapping[str, str]  # name -> Markdown
    hparams: Mapping[str, HparamValue]
    scores: Sequence[str]  # metrics of an evaluation, the most important first


class Logger:
    """What the engine logs to; without a method of its own, a logger writes nothing. What is drawn or counted
    for a logger is given as a function: only one that writes calls it.
    """

    def log(self, *lines: str) -> None:
        """Print lines and append them to log.txt. A line break within one, as in a name, is escaped."""

    def write_file(self, name: str, content: str) -> None:
        """Write a file into the run folder."""

    def step_done(self, step: int) -> None:
        """Show the progress of training, if it is time; log what the first steps take."""

    def evaluating(self, done: int, total: int) -> None:
        """Show the progress of an evaluation, if it is time; `done` is 0 when it begins."""

    def log_training(self, step: int, values: Values) -> None:
        """Log the training metrics of a log point."""

    def log_evaluation(self, step: int, values: Values) -> None:
        """Log the metrics of an evaluation."""

    def log_ranks(self, step: int, values: Mapping[str, float]) -> None:
        """Log times of all ranks, by tag, to TensorBoard alone."""

    def log_text(self, step: int, name: str, markdown: str) -> None:
        """Log a text to TensorBoard alone."""

    def log_pictures(self, step: int, group: str, draw: Callable[[], Mapping[str, EncodedPicture]]) -> None:
        """Log pictures by name to TensorBoard alone."""

    def log_histograms(
        self, step: int, group: str, collect: Callable[[], Mapping[str, Iterable[Tensor]]]
    ) -> None:
        """Log histograms of tensors by name to TensorBoard alone."""

    def describe(self, step: int, describe: Callable[[], RunDescription]) -> None:
        """Log what the run is to TensorBoard, once for each time that it is started."""

    def finish(self, step: int) -> None:
        """Note that the run has reached its last step."""

    def go_back(self, step: int) -> None:
        """Forget the metrics of steps later than `step`, which will be trained again."""

    def close(self) -> None:
        """Flush and close files."""


class NullLogger(Logger):
    """Logger of the ranks that write nothing."""


class FurtherLogger:
    """A logger of --log-to. It gets the same metrics as metrics.jsonl, which has them already."""

    package = ""  # that it needs
    problem = ""  # what prevents writing, to be logged once

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        """Begin the run of this name."""

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write the metrics of training or of an evaluation."""

    def go_back(self) -> None:
        """Forget what metrics.jsonl has no longer."""

    def close(self, *, finished: bool) -> None:
        """Write what is left."""


FURTHER_LOGGERS: Registry[type[FurtherLogger]] = Registry("logger", "--log-to")


def check_packages(names: Sequence[str]) -> None:
    """Raise UserError if the package of a further logger is missing."""
    for name in names:
        package = FURTHER_LOGGERS.find(name).package
        if package and find_spec(package) is None:
            raise UserError(
                f"--log-to {name} needs the package {package}. Install it with "
                f"pip install 'horovod_volo[{package}]', or drop --log-to {name}."
            )
