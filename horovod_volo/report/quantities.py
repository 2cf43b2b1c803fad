"""The numbers of metrics.jsonl: what they are called in a report, and how they are written and drawn."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

AVERAGED = "ema_"  # begins the names of the metrics of averaged weights
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Quantity:
    """The name of a number, its unit, and how it is drawn."""

    title: str
    form: Literal["number", "percent", "fraction", "count", "rate"] = "number"
    unit: str = ""
    from_zero: bool = False  # the axis begins at 0
    may_be_log: bool = False  # the axis is logarithmic where the values differ by orders of magnitude
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


def short(value: float) -> str:
    """Write a number with few digits: a power of ten where it is small or large."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.6g}"
    mantissa, power = f"{value:.2e}".split("e")
    exponent = str(int(power)).translate(_SUPERSCRIPTS)
    rounded = f"{float(mantissa):g}"
    return f"10{exponent}" if rounded == "1" else f"{rounded}·10{exponent}"


_gib = partial(Quantity, unit="GiB", from_zero=True, is_smoothed=False)
_seconds = partial(Quantity, unit="s", from_zero=True)
_count = partial(Quantity, form="count", from_zero=True, is_smoothed=False)

TRAINING = {  # besides the losses and the learning rate
    "gradient_norm": Quantity("Norm of the gradient", may_be_log=True),
    "loss_scale": Quantity("Loss scale", "count", may_be_log=True, is_smoothed=False),
    "skipped_steps": _count("Skipped steps"),
    "bad_samples": _count("Damaged samples replaced"),
}
SPEED = {
    "images_per_second": Quantity("Images per second", "count", "images/s", from_zero=True),
    "data_wait": Quantity("Waiting for data", "fraction", "% of the time", from_zero=True),
    "mfu": Quantity("Model FLOP utilisation (MFU)", "fraction", "% of the peak", from_zero=True),
    "model_tflops": Quantity("Model TFLOP/s of a rank", unit="TFLOP/s", from_zero=True),
    "device_memory_gib": _gib("Memory of the device"),
    "device_allocated_gib": _gib("Memory of the device at log points"),
    "host_memory_gib": _gib("Memory of the host"),
    "step_seconds_min": _seconds("Own part of a step, fastest rank"),
    "step_seconds_median": _seconds("Own part of a step, median rank"),
    "step_seconds_max": _seconds("Own part of a step, slowest rank"),
    "slowest_rank": _count("Slowest rank"),
}
TIME_PARTS = {
    "time_compute": "computing",
    "time_exchange": "exchange that is not hidden",
    "time_data": "waiting for data",
    "time_checkpoint": "checkpoints",
}
_PERCENTAGES = {
    "top1": "Top-1 accuracy",
    "top5": "Top-5 accuracy",
    "miou": "Mean IoU",
    "pixel_accuracy": "Accuracy of pixels",
    "class_accuracy": "Accuracy of classes",
    "ap": "AP, the mean over IoU 0.50 to 0.95",
    "ap50": "AP at IoU 0.50",
    "ap75": "AP at IoU 0.75",
    "ap_small": "AP of small boxes",
    "ap_medium": "AP of medium boxes",
    "ap_large": "AP of large boxes",
    "ar1": "Recall with 1 box an image",
    "ar10": "Recall with 10 boxes an image",
    "ar100": "Recall with 100 boxes an image",
    "ar_small": "Recall of small boxes",
    "ar_medium": "Recall of medium boxes",
    "ar_large": "Recall of large boxes",
}
MAIN_SCORES = ("top1", "miou", "ap")  # of each task; a record has one of them
_QUANTITIES = {
    "loss": Quantity("Loss"),
    "lr": Quantity("Learning rate", "rate", is_smoothed=False),
    **TRAINING,
    **SPEED,
    **{key: Quantity(title, "percent", "%") for key, title in _PERCENTAGES.items()},
}


def quantity(key: str) -> Quantity:
    """Return what a key of metrics.jsonl is; one that is not known here is called what it is."""
    return _QUANTITIES.get(key) or Quantity(key.replace("_", " ").capitalize())
