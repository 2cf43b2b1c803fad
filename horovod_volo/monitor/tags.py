"""The charts of TensorBoard: the tag and the description of each metric, and how charts are put together.

docs/monitoring.md lists the same tags. A metric that says nothing is not charted: `TellingSeries` holds it
back until it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from horovod_volo.monitor.metrics_file import MetricsRecord, is_of_training
from horovod_volo.monitor.progress import Values

TRAIN, EVALUATION = "train", "evaluation"
BY_EPOCH, BY_HOUR = "evaluation by epoch", "evaluation by hour"  # groups with other horizontal axes
SMOOTHED = "_smoothed"
# Of the horizontal axis of BY_HOUR: TensorBoard shows 12,000 as 12k, which are 12 hours.
PARTS_PER_HOUR = 1000
_SMOOTHING = 0.9  # weight of the earlier mean


class MetricChart(NamedTuple):
    """Where a metric is shown, and what it is."""

    tag: str
    description: str = ""


# metric -> tag, description
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


def chart_of(kind: str, name: str) -> MetricChart:
    """Return the chart of a metric of training or of an evaluation."""
    plain = name.removesuffix(SMOOTHED)
    if kind != TRAIN or plain not in _CHARTS:
        return MetricChart(f"{kind}/{name}")
    tag, description = _CHARTS[plain]
    if plain != name:
        return MetricChart(f"{tag}{SMOOTHED}", f"Running mean. {description}")
    return MetricChart(tag, description)


class TellingSeries:
    """Leaves out metrics that have said nothing so far; `earlier` are the records of a run that resumes."""

    def __init__(self, earlier: Iterable[MetricsRecord] = ()) -> None:
        self._resting: dict[tuple[str, str], float | None] = {
            (kind, name): value for kind in (TRAIN, EVALUATION) for name, value in _AT_REST.items()
        }
        for record in earlier:
            self.select(TRAIN if is_of_training(record) else EVALUATION, record)

    def select(self, kind: str, values: Values) -> Values:
        """Return the metrics to show; from the first telling value on, a metric is always shown."""
        return {
            name: value
            for name, value in values.items()
            if name not in _UNCHARTED[kind] and self._tells(kind, name, value)
        }

    def _tells(self, kind: str, name: str, value: float) -> bool:
        key = (kind, name)
        if key not in self._resting:
            return True
        if self._resting[key] is None:
            self._resting[key] = value
        if self._resting[key] == value:
            return False
        del self._resting[key]
        return True


class RunningMeans:
    """Smooths losses over log points, as if their mean had begun with the first; `earlier` as above."""

    def __init__(self, earlier: Iterable[MetricsRecord] = ()) -> None:
        self._means: dict[str, tuple[float, float]] = {}  # name -> weighted sum and sum of weights
        for record in earlier:
            if is_of_training(record):
                self.add(record)

    def add(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the running means of the losses after a log point."""
        for name, value in values.items():
            if name == "loss" or name.endswith("_loss"):
                total, weight = self._means.get(name, (0.0, 0.0))
                self._means[name] = (
                    _SMOOTHING * total + (1 - _SMOOTHING) * value,
                    _SMOOTHING * weight + (1 - _SMOOTHING),
                )
        return {f"{name}{SMOOTHED}": total / weight for name, (total, weight) in self._means.items()}
