"""What TensorBoard shows: which metrics, under which tags, against which axes, as events of its files.

The events are bytes that are appended to a file. TensorBoard's own EventFileWriter could not do that: after a
write that failed it drops what it has, and writes nothing more. Invariant: after `session_start`, TensorBoard
ignores earlier events of its step and later ones, whatever they show.

docs/monitoring.md lists the same tags. Evaluations are charted against epochs and against hours too.
TensorBoard knows steps and wall time only, so these charts have epochs, and thousandths of hours, in the
place of steps, and are in a folder of their own: a resumed run voids earlier events by their steps. There,
all that is to be shown is written again.
"""

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from horovod_volo.monitor.logger import (
    EVALUATION,
    TRAIN,
    MetricsRecord,
    Picture,
    RunDescription,
    Values,
    kind_of,
)

OTHER_AXES = "by_epoch_and_hour"  # the folder of charts whose horizontal axis is not the step
_BY_EPOCH, _BY_HOUR = "evaluation by epoch", "evaluation by hour"  # their groups
_RGB = 3  # TensorBoard's number of this color space
_PARTS_PER_HOUR = 1000  # TensorBoard shows 12,000 as 12k, which are 12 hours

# Tags of metrics of training outside of the group `train`.
_TAGS = {
    **{name: f"speed/{name}" for name in ("images_per_second", "model_tflops", "mfu")},
    **{f"time_{name}": f"time/{name}" for name in ("data", "compute", "exchange", "checkpoint")},
    **{f"step_seconds_{which}": f"ranks/step_seconds_{which}" for which in ("min", "median", "max")},
    "slowest_rank": "ranks/slowest_rank",
    "hours": "time/hours",
    "host_memory_gib": "memory/host_gib",
    "device_memory_gib": "memory/device_peak_gib",
    "device_allocated_gib": "memory/device_gib",
}
# Metrics that only restate the step, or another metric.
_RESTATED = {"step", "epoch", "images_seen"}
_UNCHARTED = {TRAIN: {*_RESTATED, "data_wait"}, EVALUATION: {*_RESTATED, "hours"}}
# What a metric is while it says nothing; None: what it was first.
_AT_REST: Mapping[str, float | None] = {
    "slowest_rank": None,
    "images": None,
    **dict.fromkeys(("token_loss", "bad_samples", "skipped_steps", "time_exchange", "time_checkpoint"), 0.0),
}


class Board:
    """Makes events of metrics; `earlier` are the records of the run so far.

    A metric that has said nothing so far is not charted.
    """

    def __init__(self, earlier: Iterable[MetricsRecord] = ()) -> None:
        self._resting = {(kind, name): value for kind in _UNCHARTED for name, value in _AT_REST.items()}
        for record in earlier:
            self.select(kind_of(record), record)

    def select(self, kind: str, values: Values) -> Values:
        """Return what is charted of the metrics of training or of an evaluation."""
        return {
            name: value
            for name, value in values.items()
            if name not in _UNCHARTED[kind] and self._tells((kind, name), value)
        }

    def scalars(self, kind: str, step: int, values: Values) -> bytes:
        """Return points of curves of training or of an evaluation."""
        tags, shown = _TAGS if kind == TRAIN else {}, self.select(kind, values)
        points = {tags.get(name, f"{kind}/{name}"): value for name, value in shown.items()}
        return scalars(step, points)

    def other_axes(self, values: Values) -> bytes:
        """Return an evaluation against epochs and hours."""
        shown = self.select(EVALUATION, values)
        axes = ((_BY_EPOCH, "epoch", 1), (_BY_HOUR, "hours", _PARTS_PER_HOUR))
        return b"".join(
            scalars(round(factor * values[key]), {f"{group}/{name}": value for name, value in shown.items()})
            for group, key, factor in axes
            if key in values
        )

    def _tells(self, key: tuple[str, str], value: float) -> bool:
        """Return whether a metric says something now, or ever did."""
        if key not in self._resting:
            return True
        if self._resting[key] is None:
            self._resting[key] = value
        if self._resting[key] == value:
            return False
        del self._resting[key]
        return True


def all_other_axes(records: Iterable[MetricsRecord]) -> bytes:
    """Return all evaluations against epochs and hours, in the place of earlier events of their folder."""
    board = Board()
    points = (board.other_axes(record) for record in records if kind_of(record) == EVALUATION)
    return file_start(0) + b"".join(points)


def description_events(step: int, description: RunDescription) -> bytes:
    """Return texts, hyperparameters and the layout of charts of a run that begins."""
    texts = (_event(step, summary=text_pb(f"run/{tag}", text)) for tag, text in description.texts.items())
    # torch takes booleans for numbers.
    hparams = {
        name: str(value) if isinstance(value, bool) else value for name, value in description.hparams.items()
    }
    scores = dict.fromkeys(f"{EVALUATION}/{score}" for score in description.scores)
    experiment, start, _ = summary.hparams(hparams, scores)  # type: ignore[no-untyped-call]
    layout = summary.custom_scalars(_layout(description.scores[0]))  # type: ignore[no-untyped-call]
    return b"".join([*texts, *(_event(step, summary=each) for each in (experiment, start, layout))])


def _layout(score: str) -> Mapping[str, Mapping[str, tuple[str, Sequence[str]]]]:
    """Return what the tab of custom scalars shows, by category and title; `score` is the most important one.

    It is "Multiline" and patterns of tags, or "Margin" and the tags of value, lower and upper.
    """

    def curves(*tags: str) -> tuple[str, Sequence[str]]:
        return "Multiline", tags

    scores = f"(ema_)?{score}$"
    seconds = [f"ranks/step_seconds_{which}" for which in ("median", "min", "max")]
    return {
        "accuracy": {
            f"{score} by epoch": curves(f"{_BY_EPOCH}/{scores}"),
            f"{score} by hour, in thousandths": curves(f"{_BY_HOUR}/{scores}"),
            f"{score} by step": curves(f"^{EVALUATION}/{scores}"),
        },
        "loss": {
            "training": curves(r"^train/loss$"),
            "parts": curves(r"^train/\w+_loss$"),
            "training and evaluation": curves(r"^train/loss$", r"^evaluation/(ema_)?loss$"),
        },
        "update": {
            "learning rate": curves(r"^train/lr$"),
            "gradient norm": curves(r"^train/gradient_norm$"),
            "loss scale, skipped steps": curves(r"^train/(loss_scale|skipped_steps)$"),
        },
        "speed": {
            "images per second": curves(r"^speed/images_per_second$"),
            "fractions of wall time": curves(r"^time/(data|compute|exchange|checkpoint)$"),
            "MFU": curves(r"^speed/mfu$"),
        },
        "ranks": {
            "seconds of a step: median, fastest and slowest rank": ("Margin", seconds),
            "each rank": curves(r"^rank seconds/"),
            "memory, GiB": curves(r"^memory/"),
        },
    }


def file_start(first_step: int) -> bytes:
    """Return the first events of a file: its version, and the step from which on earlier files are void."""
    return _event(0, file_version="brain.Event:2") + session_start(first_step)


def session_start(first_step: int) -> bytes:
    """Return the event after which TensorBoard ignores earlier ones from a step on."""
    return _event(first_step, session_log=SessionLog(status=SessionLog.START))


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Return a point of each curve, by tag, in one event."""
    points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    return _event(step, summary=Summary(value=points))


def picture(step: int, tag: str, encoded: Picture) -> bytes:
    png, width, height = encoded
    image = Summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=png)
    return _event(step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))


def session_end(step: int) -> bytes:
    """Return that the run is finished, for the plugin of hyperparameters."""
    return _event(step, summary=summary.hparams({}, {})[2])  # type: ignore[no-untyped-call]


def _event(step: int, **content: Any) -> bytes:
    """Return an event as a record of its file."""
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return record.getvalue()
