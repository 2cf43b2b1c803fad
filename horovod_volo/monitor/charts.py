"""The charts of TensorBoard: which metrics they show, under which tags, against which axes.

docs/monitoring.md lists the same tags. Evaluations are charted against epochs and against hours too.
TensorBoard knows steps and wall time only, so these charts have epochs, and thousandths of hours, in the
place of steps, and are in a folder of their own: a resumed run voids earlier events by their steps. There,
all that is to be shown is written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horovod_volo.monitor import event_records
from horovod_volo.monitor.event_records import band, curves
from horovod_volo.monitor.logger import EVALUATION, TRAIN, MetricsRecord, RunDescription, Values, kind_of

OTHER_AXES = "by_epoch_and_hour"  # the folder of charts whose horizontal axis is not the step
_BY_EPOCH, _BY_HOUR = "evaluation by epoch", "evaluation by hour"  # their groups
_EPOCH_AXIS = f"Horizontal axis: epochs. The run's own charts under {EVALUATION} have steps."
_PARTS_PER_HOUR = 1000  # TensorBoard shows 12,000 as 12k, which are 12 hours
_HOUR_AXIS = (
    f"Horizontal axis: hours of training times {_PARTS_PER_HOUR:,}, so that 12k are twelve hours; with "
    "evaluations and checkpoints, without the time between a stop and a resume."
)
_SMOOTHED = "_smoothed"
_SMOOTHING = 0.9  # weight of the earlier mean

# metric of training -> tag, description
_CHARTS = {
    "loss": ("train/loss", "Mean loss since the last log point, over all ranks."),
    "class_loss": ("train/class_loss", "Cross-entropy of the class, before weighting."),
    "token_loss": ("train/token_loss", "Cross-entropy of the token labels, before weighting."),
    "lr": ("train/lr", "Learning rate of the last step."),
    "gradient_norm": ("train/gradient_norm", "Norm of all gradients at a log point, before clipping."),
    "loss_scale": ("train/loss_scale", "Factor of the loss that keeps gradients within fp16."),
    "skipped_steps": ("train/skipped_steps", "Steps without an update since the start of the run."),
    "bad_samples": ("train/bad_samples", "Damaged images left out since the trainer was started."),
    "images_per_second": ("speed/images_per_second", "Training images per second of all ranks."),
    "model_tflops": (
        "speed/model_tflops",
        "10^12 floating-point operations per second and rank that the model needs: three forwards.",
    ),
    "mfu": ("speed/mfu", "Model FLOPs utilisation: model_tflops as a fraction of the GPU's peak."),
    "time_data": ("time/data", "Fraction of wall time spent waiting for data."),
    "time_compute": ("time/compute", "Fraction of wall time for all that the others do not contain."),
    "time_exchange": ("time/exchange", "Fraction of wall time spent waiting for other ranks' gradients."),
    "time_checkpoint": ("time/checkpoint", "Fraction of wall time in which a checkpoint held training up."),
    "hours": ("time/hours", "Hours of training since the start of the run."),
    "host_memory_gib": ("memory/host_gib", "Resident memory of the rank that has most, GiB."),
    "device_memory_gib": ("memory/device_peak_gib", "Peak of tensors on a GPU, of the rank with most, GiB."),
    "device_allocated_gib": ("memory/device_gib", "Tensors on a GPU now, of the rank with most, GiB."),
    "step_seconds_min": ("ranks/step_seconds_min", "Time of the fastest rank for its part of a step."),
    "step_seconds_median": ("ranks/step_seconds_median", "Time of the median rank for its part of a step."),
    "step_seconds_max": ("ranks/step_seconds_max", "Time of the slowest rank for its part of a step."),
    "slowest_rank": ("ranks/slowest_rank", "The rank that the others wait for."),
}
# Metrics that only restate the step, or another metric.
_RESTATED = {"step", "epoch", "images_seen"}
_UNCHARTED = {TRAIN: {*_RESTATED, "data_wait"}, EVALUATION: {*_RESTATED, "hours"}}
# What a metric is while it says nothing; None: what it was first.
_AT_REST: Mapping[str, float | None] = {
    "token_loss": 0.0,
    "bad_samples": 0,
    "skipped_steps": 0,
    "time_exchange": 0.0,
    "time_checkpoint": 0.0,
    "slowest_rank": None,
    "images": None,
}


class Board:
    """Makes events of metrics; `earlier` are the records of the run so far.

    A metric that has said nothing so far is not charted. Losses are smoothed over log points too, as if their
    mean had begun with the first.
    """

    def __init__(self, earlier: Iterable[MetricsRecord] = ()) -> None:
        self._resting = {(kind, name): value for kind in _UNCHARTED for name, value in _AT_REST.items()}
        self._means: dict[str, tuple[float, float]] = {}  # name -> weighted sum and sum of weights
        self._described: set[str] = set()
        for record in earlier:
            self.select(kind_of(record), record)

    def select(self, kind: str, values: Values) -> Values:
        """Return what is charted of the metrics of training or of an evaluation."""
        means = {}
        if kind == TRAIN:
            losses = (name for name in values if name == "loss" or name.endswith("_loss"))
            means = {name: self._mean(name, values[name]) for name in losses}
        shown = {
            name: value
            for name, value in values.items()
            if name not in _UNCHARTED[kind] and self._tells((kind, name), value)
        }
        return shown | {f"{name}{_SMOOTHED}": means[name] for name in shown if name in means}

    def scalars(self, kind: str, step: int, values: Values) -> bytes:
        """Return points of curves."""
        return b"".join(self._point(step, *_chart(kind, name), value) for name, value in values.items())

    def other_axes(self, values: Values) -> bytes:
        """Return an evaluation against epochs and hours."""
        shown = self.select(EVALUATION, values)
        axes = (
            (_BY_EPOCH, "epoch", 1, _EPOCH_AXIS),
            (_BY_HOUR, "hours", _PARTS_PER_HOUR, _HOUR_AXIS),
        )
        return b"".join(
            self._point(round(factor * values[key]), f"{group}/{name}", description, value)
            for group, key, factor, description in axes
            if key in values
            for name, value in shown.items()
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

    def _mean(self, name: str, value: float) -> float:
        total, weight = self._means.get(name, (0.0, 0.0))
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        self._means[name] = total, weight
        return total / weight

    def _point(self, step: int, tag: str, description: str, value: float) -> bytes:
        # TensorBoard keeps the first description of a tag.
        first = tag not in self._described
        self._described.add(tag)
        return event_records.scalars(step, {tag: value}, description if first else "")


def _chart(kind: str, name: str) -> tuple[str, str]:
    """Return the tag and the description of a metric of training or of an evaluation."""
    plain = name.removesuffix(_SMOOTHED)
    if kind != TRAIN or plain not in _CHARTS:
        return f"{kind}/{name}", ""
    tag, description = _CHARTS[plain]
    return (tag, description) if plain == name else (f"{tag}{_SMOOTHED}", f"Running mean. {description}")


def all_other_axes(records: Iterable[MetricsRecord]) -> bytes:
    """Return all evaluations against epochs and hours, in the place of earlier events of their folder."""
    board = Board()
    points = (board.other_axes(record) for record in records if kind_of(record) == EVALUATION)
    return event_records.file_start(0) + b"".join(points)


def description_events(step: int, name: str, description: RunDescription) -> bytes:
    """Return texts, hyperparameters and the layout of charts of the run of this name."""
    texts = (event_records.text(step, f"run/{tag}", text) for tag, text in description.texts.items())
    scores = [f"{EVALUATION}/{score}" for score in description.scores]
    return b"".join(
        [
            *texts,
            event_records.hparams(step, name, description.hparams, scores),
            event_records.layout(step, _layout(description.scores[0])),
        ]
    )


def _layout(score: str) -> dict[str, Sequence[Any]]:
    """Return what the tab of custom scalars shows, by category; `score` is the most important one."""
    scores = f"(ema_)?{score}$"
    seconds = [f"ranks/step_seconds_{which}" for which in ("median", "min", "max")]
    return {
        "accuracy": [
            curves(f"{score} by epoch", f"{_BY_EPOCH}/{scores}"),
            curves(f"{score} by hour, in thousandths", f"{_BY_HOUR}/{scores}"),
            curves(f"{score} by step", f"^{EVALUATION}/{scores}"),
        ],
        "loss": [
            curves("training, and its running mean", r"^train/loss(_smoothed)?$"),
            curves("parts, running means", r"^train/\w+_loss_smoothed$"),
            curves("training and evaluation", r"^train/loss_smoothed$", r"^evaluation/(ema_)?loss$"),
        ],
        "update": [
            curves("learning rate", r"^train/lr$"),
            curves("gradient norm", r"^train/gradient_norm$"),
            curves("loss scale, skipped steps", r"^train/(loss_scale|skipped_steps)$"),
        ],
        "speed": [
            curves("images per second", r"^speed/images_per_second$"),
            curves("fractions of wall time", r"^time/(data|compute|exchange|checkpoint)$"),
            curves("MFU", r"^speed/mfu$"),
        ],
        "ranks": [
            band("seconds of a step: median, fastest and slowest rank", *seconds),
            curves("each rank", r"^rank seconds/"),
            curves("memory, GiB", r"^memory/"),
        ],
    }
