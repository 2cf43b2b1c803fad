"""Accuracy of our trainer and of timm's train.py: the same images, network and settings, several seeds.

Every run is a process of its own, one after another on all cores of this one. A finished run stays in its
folder and is read when the command is repeated, so that seeds can be added later. Means over the seeds have
intervals by Student's t; the median and its bootstrap, which benchmarks of speed use, need more samples than
there are seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Annotated, Literal

import numpy as np

from horovod_volo.bench.cli import Flag, ImgSize
from horovod_volo.bench.comparison import Estimate
from horovod_volo.bench.machine.training_runs import (
    Budget,
    RunResult,
    our_command,
    read_ours,
    read_timm,
    run_once,
    timm_command,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.models.volo import SIZES

# Names in figures, and the beginnings of the runs' folders.
TIMM, OURS, LABELLED = "timm's train.py", "ours", "ours with token labels"
_FOLDERS = {TIMM: "timm", OURS: "ours", LABELLED: "labelled"}
_CONFIDENCE = 0.95
_INTEGRAL_END, _INTEGRAL_STEP = 200.0, 1e-4  # the quantile of one degree of freedom is 12.7


def measure(
    *,
    data_dir: Annotated[
        str, Flag("folder with train/CLASS/IMAGE and val/CLASS/IMAGE", metavar="DATA_DIR", positional=True)
    ],
    against: Annotated[Literal["timm"], Flag("peer")] = "timm",  # noqa: ARG001  # the only one so far
    timm: Annotated[str, Flag("checkout of timm, with train.py", metavar="DIR")],
    token_label_data: Annotated[
        str, Flag("packed label maps of the training images; ours is also trained with them", metavar="DIR")
    ] = "",
    seeds: Annotated[Sequence[int], Flag("seeds, one run of each side for each")] = (1, 2, 3, 4, 5),
    output: Annotated[str, Flag("folder of the runs; finished runs are not repeated", metavar="DIR")] = (
        "runs/learning"
    ),
    model: Annotated[str, Flag("size of VOLO", metavar="NAME")] = "volo_demo",
    img_size: ImgSize = 64,
    batch_size: Annotated[int, Flag("images per step")] = 64,
    epochs: Annotated[int, Flag("epochs; the first is the warm-up")] = 10,
    lr: Annotated[float, Flag("peak learning rate", metavar="RATE")] = 2e-3,
) -> Result:
    """Train every side from every seed; return means over the seeds."""
    _check(model, timm, seeds)
    classes, images = _count(data_dir, batch_size)
    data_dir = str(Path(data_dir).resolve())
    budget = Budget(data_dir, classes, epochs * images, model, img_size, batch_size, epochs, lr)
    runs: dict[str, list[RunResult]] = {side: [] for side in (TIMM, OURS)}
    runs |= {LABELLED: []} if token_label_data else {}
    for seed in seeds:
        for side, results in runs.items():
            folder = Path(output) / f"{_FOLDERS[side]}_seed{seed}"
            if side == TIMM:
                seconds = run_once(timm_command(budget, str(Path(timm).resolve()), seed, folder), folder)
                results.append(read_timm(folder, seconds, budget))
            else:
                labels = token_label_data if side == LABELLED else ""
                seconds = run_once(our_command(budget, seed, folder, labels), folder)
                results.append(read_ours(folder, seconds, budget))
            print(f"{side}, seed {seed}: {results[-1]}", file=sys.stderr, flush=True)
    title = f"{model} at {img_size} px, {epochs} epochs, batch {batch_size}; means over {len(seeds)} seeds"
    return Result("learning", f"{title} with 95 % intervals", _figures(runs))


def _check(model: str, timm: str, seeds: Sequence[int]) -> None:
    if model not in SIZES:
        raise UserError(f"--model {model} is no size of VOLO. Take one of {', '.join(SIZES)}.")
    if not (Path(timm) / "train.py").is_file():
        raise UserError(
            f"There is no train.py in {timm}. Give a checkout of huggingface/pytorch-image-models to --timm."
        )
    if len(set(seeds)) < len(seeds) or len(seeds) < 2:
        raise UserError("--seeds takes two or more, each once: one run has no spread.")


def _count(data_dir: str, batch_size: int) -> tuple[int, int]:
    """Return the number of classes, and of images in the whole batches of an epoch."""
    for split in ("val", "train"):
        with closing(build_catalog(data_dir, split, folder=None)) as catalog:
            classes, images = len(catalog.classes), len(catalog)
    if images < batch_size:
        raise UserError(f"{data_dir} has {images} training images. Use --batch-size {images} or less.")
    return classes, images // batch_size * batch_size


def _figures(runs: dict[str, list[RunResult]]) -> list[Figure]:
    figures = []
    for side, results in runs.items():
        top1 = [result.top1 for result in results]
        figures += [
            Figure.of_estimate(f"{side}: top-1", mean_of(top1), "%"),
            Figure(f"{side}: standard deviation of top-1", stdev(top1), "points"),
        ]
        for label, name in (
            ("held-out loss", "held_out_loss"),
            ("training loss, last epoch", "loss"),
            ("images a second", "images_per_second"),
            ("minutes", "minutes"),
        ):
            values = [getattr(result, name) for result in results]
            figures.append(Figure.of_estimate(f"{side}: {label}", mean_of(values), ""))
        if side != TIMM:
            gained = difference_of(top1, [result.top1 for result in runs[TIMM]])
            figures.append(Figure.of_estimate(f"{side}: top-1 above timm's", gained, "points"))
    return figures


def mean_of(samples: Sequence[float]) -> Estimate:
    """Return the mean of two or more samples."""
    error = math.sqrt(variance(samples) / len(samples))
    return _interval(fmean(samples), error, len(samples) - 1)


def difference_of(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of `first` minus that of `second`; Welch's formula, as the variances may differ."""
    parts = [variance(samples) / len(samples) for samples in (first, second)]
    total = sum(parts)
    weights = [part**2 / (len(samples) - 1) for part, samples in zip(parts, (first, second), strict=True)]
    freedom = total**2 / sum(weights) if total else 1.0
    return _interval(fmean(first) - fmean(second), math.sqrt(total), freedom)


def t_quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    places = np.arange(0, _INTEGRAL_END, _INTEGRAL_STEP) + _INTEGRAL_STEP / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(places**2 / freedom))
    return float(places[np.searchsorted(np.cumsum(density) * _INTEGRAL_STEP, _CONFIDENCE / 2)])


def _interval(value: float, error: float, freedom: float) -> Estimate:
    half_width = t_quantile(freedom) * error
    return Estimate(value, value - half_width, value + half_width)
