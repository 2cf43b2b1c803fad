"""What the numbers in metrics.jsonl are called in a report, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.report.axes import short

Form = Literal["number", "percent", "fraction", "count", "rate"]


@dataclass(frozen=True)
class Quantity:
    """The name of a number, its unit, and how it is drawn."""

    title: str
    form: Form = "number"
    unit: str = ""
    from_zero: bool = False  # the axis begins at 0
    may_be_log: bool = False  # the axis is logarithmic where the values differ by orders of magnitude
    zero: str = ""  # what is said if it is 0 throughout
    is_smoothed: bool = True  # a long curve of it is drawn as a running mean

    def scaled(self, value: float) -> float:
        """Return a value in the unit of the axis."""
        return 100 * value if self.form == "fraction" else value

    def written(self, value: float) -> str:
        """Return a value in the unit of the axis, with its unit."""
        if self.form in ("percent", "fraction"):
            return f"{value:.2f} %"
        if self.form == "rate":
            text = short(value)
        elif self.form == "count" or value == int(value):
            text = f"{value:,.0f}"
        else:
            text = f"{value:,.1f}" if abs(value) >= 1000 else f"{value:#.4g}"
        return f"{text} {self.unit}".rstrip()


def _percent(title: str) -> Quantity:
    return Quantity(title, "percent", "%")


def _gib(title: str) -> Quantity:
    return Quantity(title, unit="GiB", from_zero=True, is_smoothed=False)


def _count(title: str, zero: str = "") -> Quantity:
    return Quantity(title, "count", from_zero=True, zero=zero, is_smoothed=False)


TRAINING = {  # besides the losses and the learning rate
    "gradient_norm": Quantity("Norm of the gradient", may_be_log=True),
    "loss_scale": Quantity("Loss scale", "count", may_be_log=True, is_smoothed=False),
    "skipped_steps": _count("Skipped steps", zero="no step was skipped"),
    "bad_samples": _count("Damaged samples replaced", zero="no damaged sample was met in training"),
}
SPEED = {
    "images_per_second": Quantity("Images per second", "count", "images/s", from_zero=True),
    "data_wait": Quantity("Waiting for data", "fraction", "% of the time", from_zero=True),
    "mfu": Quantity("Model FLOP utilisation (MFU)", "fraction", "% of the peak", from_zero=True),
    "model_tflops": Quantity("Model TFLOP/s of a rank", unit="TFLOP/s", from_zero=True),
    "device_memory_gib": _gib("Memory of the device"),
    "device_allocated_gib": _gib("Memory of the device at log points"),
    "host_memory_gib": _gib("Memory of the host"),
    "step_seconds_min": Quantity("Own part of a step, fastest rank", unit="s", from_zero=True),
    "step_seconds_median": Quantity("Own part of a step, median rank", unit="s", from_zero=True),
    "step_seconds_max": Quantity("Own part of a step, slowest rank", unit="s", from_zero=True),
    "slowest_rank": _count("Slowest rank"),
}
QUANTITIES = {
    "loss": Quantity("Loss"),
    "lr": Quantity("Learning rate", "rate", may_be_log=True, is_smoothed=False),
    **TRAINING,
    **SPEED,
    "top1": _percent("Top-1 accuracy"),
    "top5": _percent("Top-5 accuracy"),
    "miou": _percent("Mean IoU"),
    "pixel_accuracy": _percent("Accuracy of pixels"),
    "class_accuracy": _percent("Accuracy of classes"),
    "ap": _percent("AP, the mean over IoU 0.50 to 0.95"),
    "ap50": _percent("AP at IoU 0.50"),
    "ap75": _percent("AP at IoU 0.75"),
    "ap_small": _percent("AP of small boxes"),
    "ap_medium": _percent("AP of medium boxes"),
    "ap_large": _percent("AP of large boxes"),
    "ar1": _percent("Recall with 1 box an image"),
    "ar10": _percent("Recall with 10 boxes an image"),
    "ar100": _percent("Recall with 100 boxes an image"),
    "ar_small": _percent("Recall of small boxes"),
    "ar_medium": _percent("Recall of medium boxes"),
    "ar_large": _percent("Recall of large boxes"),
}
TIME_PARTS = {
    "time_compute": "computing",
    "time_exchange": "exchange that is not hidden",
    "time_data": "waiting for data",
    "time_checkpoint": "checkpoints",
}
SCORES = ("top1", "miou", "ap")  # the main one of each task; a record has one of them
AVERAGED = "ema_"


def quantity(key: str) -> Quantity:
    """Return what a key of metrics.jsonl is; one that is not known here is called what it is."""
    return QUANTITIES.get(key) or Quantity(key.replace("_", " ").capitalize())
