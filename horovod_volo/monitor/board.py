"""A run in TensorBoard: the bytes of the events of what is logged.

Events lie in the run folder itself, so that TensorBoard shows the run under its name. Evaluations are charted
against epochs and against hours too. TensorBoard knows steps and wall time only, so these charts have epochs,
and thousandths of hours, in the place of steps, and are in a folder of their own: a resumed run voids earlier
events by their steps. There, all that is to be shown is written again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from horovod_volo.monitor import event_records
from horovod_volo.monitor.event_records import Curves
from horovod_volo.monitor.logger import RunDescription
from horovod_volo.monitor.metrics_file import MetricsRecord, is_of_training
from horovod_volo.monitor.progress import Values
from horovod_volo.monitor.tags import (
    BY_EPOCH,
    BY_HOUR,
    EVALUATION,
    PARTS_PER_HOUR,
    RunningMeans,
    TellingSeries,
    chart_of,
)

OTHER_AXES = "by_epoch_and_hour"  # the folder of charts whose horizontal axis is not the step
_FORMER_FOLDER = "tensorboard"  # where earlier versions had the events
_EVENT_FILES = "events.out.tfevents.*"
_BY_EPOCH = f"Horizontal axis: epochs. The run's own charts under {EVALUATION} have steps."
_BY_HOUR = (
    f"Horizontal axis: hours of training times {PARTS_PER_HOUR:,}, so that 12k are twelve hours; with "
    "evaluations and checkpoints, without the time between a stop and a resume."
)


def event_file(folder: Path) -> Path:
    """Return the path of a new file of events."""
    return folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"


def adopt_earlier_events(folder: Path) -> None:
    """Move the events that an earlier version wrote elsewhere, so that a resumed run is not shown twice."""
    former = folder / _FORMER_FOLDER
    for file in former.glob(_EVENT_FILES):
        file.replace(folder / file.name)
    if former.is_dir() and not any(former.iterdir()):
        former.rmdir()


class Board:
    """Makes events of metrics; `earlier` are the records of the run so far."""

    def __init__(self, earlier: Sequence[MetricsRecord]) -> None:
        self._telling = TellingSeries(earlier)
        self._means = RunningMeans(earlier)
        self._described: set[str] = set()

    def select(self, kind: str, values: Values) -> Values:
        """Return what is charted of the metrics of training or of an evaluation."""
        shown = self._telling.select(kind, values)
        if kind == EVALUATION:
            return shown
        means = self._means.add(values)
        return shown | {name: means[name] for each in shown if (name := f"{each}_smoothed") in means}

    def scalars(self, kind: str, step: int, values: Values) -> bytes:
        """Return points of curves."""
        return b"".join(self._point(step, *chart_of(kind, name), value) for name, value in values.items())

    def other_axes(self, values: Values) -> bytes:
        """Return an evaluation against epochs and hours."""
        shown = self._telling.select(EVALUATION, values)
        events = []
        for group, key, factor, description in (
            (BY_EPOCH, "epoch", 1, _BY_EPOCH),
            (BY_HOUR, "hours", PARTS_PER_HOUR, _BY_HOUR),
        ):
            if key in values:
                step = round(factor * values[key])
                events += [
                    self._point(step, f"{group}/{name}", description, value) for name, value in shown.items()
                ]
        return b"".join(events)

    def _point(self, step: int, tag: str, description: str, value: float) -> bytes:
        # TensorBoard keeps the first description of a tag.
        first = tag not in self._described
        self._described.add(tag)
        return event_records.scalars(step, {tag: value}, description if first else "")


def all_other_axes(records: Iterable[MetricsRecord]) -> bytes:
    """Return all evaluations against epochs and hours, in the place of earlier events of their folder."""
    board = Board(())
    points = (board.other_axes(record) for record in records if not is_of_training(record))
    return event_records.file_start(0) + b"".join(points)


def description_events(step: int, name: str, description: RunDescription) -> bytes:
    """Return texts, hyperparameters and the layout of charts of the run of this name."""
    texts = (event_records.text(step, f"run/{tag}", text) for tag, text in description.texts.items())
    scores = [f"{EVALUATION}/{score}" for score in description.scores]
    return b"".join(
        [
            *texts,
            event_records.hparams(step, name, description.hparams, scores),
            event_records.layout(step, layout(description.scores)),
        ]
    )


def layout(scores: Sequence[str]) -> dict[str, list[Curves]]:
    """Return what the tab of custom scalars shows, by category."""
    of_scores = f"(ema_)?{scores[0]}$"
    return {
        "accuracy": [
            Curves(f"{scores[0]} by epoch", [f"{BY_EPOCH}/{of_scores}"]),
            Curves(f"{scores[0]} by hour, in thousandths", [f"{BY_HOUR}/{of_scores}"]),
            Curves(f"{scores[0]} by step", [f"^{EVALUATION}/{of_scores}"]),
        ],
        "loss": [
            Curves("training, and its running mean", [r"^train/loss(_smoothed)?$"]),
            Curves("parts, running means", [r"^train/\w+_loss_smoothed$"]),
            Curves("training and evaluation", [r"^train/loss_smoothed$", r"^evaluation/(ema_)?loss$"]),
        ],
        "update": [
            Curves("learning rate", [r"^train/lr$"]),
            Curves("gradient norm", [r"^train/gradient_norm$"]),
            Curves("loss scale, skipped steps", [r"^train/(loss_scale|skipped_steps)$"]),
        ],
        "speed": [
            Curves("images per second", [r"^speed/images_per_second$"]),
            Curves("fractions of wall time", [r"^time/(data|compute|exchange|checkpoint)$"]),
            Curves("MFU", [r"^speed/mfu$"]),
        ],
        "ranks": [
            Curves(
                "seconds of a step: median, fastest and slowest rank",
                ["ranks/step_seconds_median", "ranks/step_seconds_min", "ranks/step_seconds_max"],
                is_band=True,
            ),
            Curves("each rank", [r"^rank seconds/"]),
            Curves("memory, GiB", [r"^memory/"]),
        ],
    }
