"""Accuracy of our trainer and of timm's train.py: the same images, network and settings, several seeds.

Every run is a process of its own. A finished run is read when the command is repeated, so that seeds can be
added later. Means have intervals by Student's t; the median and its bootstrap, which benchmarks of speed use,
need more samples than there are seeds. Invariant: both command lines ask for the same; what timm has no flag
for has timm's value in ours.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev, variance
from time import perf_counter
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch

from horovod_volo.bench.cli import BatchSize, Flag, ImgSize
from horovod_volo.bench.comparison import Estimate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog

MODEL = "volo_demo"
_FINISHED, _LOG = "finished.json", "output.txt"
# Names in figures, and the beginnings of the runs' folders.
TIMM, OURS, LABELLED = "timm's train.py", "ours", "ours with token labels"
_FOLDERS = {TIMM: "timm", OURS: "ours", LABELLED: "labelled"}
_CONFIDENCE = 0.95
_INTEGRAL_END, _INTEGRAL_STEP = 200.0, 1e-4  # the quantile of one degree of freedom is 12.7


class Budget(NamedTuple):
    """What both sides are given."""

    data_dir: str
    classes: int
    images: int  # trained on in all epochs together
    img_size: int
    batch_size: int
    epochs: int
    lr: float


class RunResult(NamedTuple):
    """What one run achieved."""

    top1: float  # per cent, after the last epoch
    held_out_loss: float
    loss: float  # of training, mean over the last epoch
    images_per_second: float  # trained on, over the whole run with its start and evaluations
    minutes: float


def measure(
    *,
    data_dir: Annotated[str, Flag("folder with train/CLASS/IMAGE and val/CLASS/IMAGE", positional=True)],
    against: Annotated[Literal["timm"], Flag("peer")] = "timm",  # noqa: ARG001  # the only one so far
    timm: Annotated[str, Flag("checkout of timm, with train.py")],
    token_label_data: Annotated[
        str, Flag("packed label maps of the training images; ours is also trained with them")
    ] = "",
    seeds: Annotated[Sequence[int], Flag("seeds, one run of each side for each")] = (1, 2, 3, 4, 5),
    output: Annotated[str, Flag("folder of the runs; finished runs are not repeated")] = "runs/learning",
    img_size: ImgSize = 64,
    batch_size: BatchSize = 64,
    epochs: Annotated[int, Flag("epochs; the first is the warm-up")] = 10,
    lr: Annotated[float, Flag("peak learning rate")] = 2e-3,
) -> Result:
    """Train every side from every seed; return means over the seeds."""
    if not (Path(timm) / "train.py").is_file():
        raise UserError(
            f"There is no train.py in {timm}. Give a checkout of huggingface/pytorch-image-models to --timm."
        )
    if len(set(seeds)) < len(seeds) or len(seeds) < 2:
        raise UserError("--seeds takes two or more, each once: one run has no spread.")
    classes, images = count(data_dir, batch_size)
    data_dir = str(Path(data_dir).resolve())
    budget = Budget(data_dir, classes, epochs * images, img_size, batch_size, epochs, lr)
    sides = [side for side in _FOLDERS if side != LABELLED or token_label_data]
    found: dict[str, list[RunResult]] = {side: [] for side in sides}
    for seed in seeds:
        for side, results in found.items():
            folder = Path(output) / f"{_FOLDERS[side]}_seed{seed}"
            if side == TIMM:
                read, command = read_timm, timm_command(budget, str(Path(timm).resolve()), seed, folder)
            else:
                labels = token_label_data if side == LABELLED else ""
                read, command = read_ours, our_command(budget, seed, folder, labels)
            results.append(read(folder, run_once(command, folder), budget))
            print(f"{side}, seed {seed}: {results[-1]}", file=sys.stderr, flush=True)
    title = f"{MODEL} at {img_size} px, {epochs} epochs, batch {batch_size}; means over {len(seeds)} seeds"
    return Result("learning", f"{title} with 95 % intervals", _figures(found))


def timm_command(budget: Budget, checkout: str, seed: int, folder: Path) -> list[str]:
    """Return the command that trains timm's network with timm's script."""
    side = str(budget.img_size)
    return [
        *(sys.executable, "-m", "horovod_volo.bench.machine.peers_learning", checkout),
        *("--model", MODEL, "--num-classes", str(budget.classes), "--input-size", "3", side, side),
        *("--model-kwargs", f"img_size={side}", "use_aux_head=False"),
        *("--data-dir", budget.data_dir, "--val-split", "val"),
        *("--workers", str(len(os.sched_getaffinity(0)))),
        # The learning rate changes with every step, as ours does.
        *("--sched", "cosine", "--sched-on-updates"),
        *_common_flags(budget, seed),
        *("--output", str(folder.parent.resolve()), "--experiment", folder.name, "--checkpoint-hist", "1"),
        *("--device", "cuda" if torch.cuda.is_available() else "cpu"),
    ]


def our_command(budget: Budget, seed: int, folder: Path, token_label_data: str) -> list[str]:
    """Return the command that trains our network, with token labels where their folder is given."""
    labels = ["--token-label", "--token-label-data", str(Path(token_label_data).resolve()), "--ground-truth"]
    return [
        *(sys.executable, "-m", "horovod_volo.train", budget.data_dir),
        *("--model", MODEL, "--img-size", str(budget.img_size)),
        *("--cooldown-epochs", "0"),
        *_common_flags(budget, seed),
        *("--no-mix-token", *(labels if token_label_data else [])),
        *("--output", str(folder.parent.resolve()), "--name", folder.name, "--keep-checkpoints", "1"),
    ]


def _common_flags(budget: Budget, seed: int) -> list[str]:
    """Return the flags that have the same name and value on both sides."""
    return [
        *("-b", str(budget.batch_size), "--crop-pct", "1.0", "--scale", "0.3", "1.0"),
        *("--aa", "rand-m9-mstd0.5-inc1", "--reprob", "0.25", "--smoothing", "0.1"),
        *("--opt", "adamw", "--epochs", str(budget.epochs), "--lr", str(budget.lr), "--min-lr", "1e-5"),
        *("--warmup-epochs", "1" if budget.epochs > 1 else "0", "--warmup-lr", "1e-6"),
        *("--weight-decay", "0.05", "--clip-grad", "1.0", "--seed", str(seed)),
    ]


def run_once(command: list[str], folder: Path) -> float:
    """Run a command whose results are in `folder`, unless it has finished before; return its seconds."""
    finished = folder / _FINISHED
    if finished.exists():
        found = json.loads(finished.read_text(encoding="utf-8"))
        if found["command"] != command:
            raise UserError(f"{folder} holds a run of other settings. Give another --output.")
        return float(found["seconds"])
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    began = perf_counter()
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = perf_counter() - began
    if status:
        raise RuntimeError(f"a run ended with status {status}: see {folder / _LOG}")
    with atomic_write(finished) as file:
        file.write(json.dumps({"command": command, "seconds": seconds}).encode())
    return seconds


def read_timm(folder: Path, seconds: float, budget: Budget) -> RunResult:
    """Read the summary.csv of timm's script."""
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    last = _last_epoch(rows, folder, budget)
    top1, held_out_loss, loss = (float(last[name]) for name in ("eval_top1", "eval_loss", "train_loss"))
    return RunResult(top1, held_out_loss, loss, budget.images / seconds, seconds / 60)


def read_ours(folder: Path, seconds: float, budget: Budget) -> RunResult:
    """Read our metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    last = _last_epoch([record for record in records if "top1" in record], folder, budget)
    trained = [record for record in records if "lr" in record]
    # The loss of a record is the mean since the record before; an epoch ends with a record.
    steps = np.diff([0, *(record["step"] for record in trained)])
    of_last = [record["epoch"] > budget.epochs - 1 for record in trained]
    loss = float(np.average([record["loss"] for record in trained], weights=steps * of_last))
    return RunResult(last["top1"], last["loss"], loss, budget.images / seconds, seconds / 60)


def _last_epoch(evaluated: list[dict[str, Any]], folder: Path, budget: Budget) -> dict[str, Any]:
    if len(evaluated) != budget.epochs:
        raise RuntimeError(f"{folder} has results of {len(evaluated)} epochs, not of {budget.epochs}")
    return evaluated[-1]


def count(data_dir: str, batch_size: int) -> tuple[int, int]:
    """Return the number of classes, and of images in the whole batches of an epoch."""
    for split in ("val", "train"):
        with closing(build_catalog(data_dir, split, folder=None)) as catalog:
            classes, images = len(catalog.classes), len(catalog)
    if images < batch_size:
        raise UserError(f"{data_dir} has {images} training images. Use --batch-size {images} or less.")
    return classes, images // batch_size * batch_size


def _figures(found: dict[str, list[RunResult]]) -> list[Figure]:
    figures = []
    for side, results in found.items():
        for label, values, unit in (
            ("top-1", [result.top1 for result in results], "%"),
            ("held-out loss", [result.held_out_loss for result in results], ""),
            ("training loss, last epoch", [result.loss for result in results], ""),
            ("images a second", [result.images_per_second for result in results], ""),
            ("minutes", [result.minutes for result in results], ""),
        ):
            mean = mean_difference(values)
            figures.append(Figure(f"{side}: {label}", mean.value, unit, mean.low, mean.high))
        top1, timms = ([result.top1 for result in found[name]] for name in (side, TIMM))
        figures.append(Figure(f"{side}: standard deviation of top-1", stdev(top1), "points"))
        if side != TIMM:
            gained = mean_difference(top1, timms)
            figures.append(
                Figure(f"{side}: top-1 above timm's", gained.value, "points", gained.low, gained.high)
            )
    return figures


def mean_difference(first: Sequence[float], second: Sequence[float] = (0.0, 0.0)) -> Estimate:
    """Return the mean of `first` less that of `second`, by Welch's formula, as the variances may differ."""
    parts = [variance(samples) / len(samples) for samples in (first, second)]
    total = sum(parts)
    weights = [part**2 / (len(samples) - 1) for part, samples in zip(parts, (first, second), strict=True)]
    half_width = t_quantile(total**2 / sum(weights)) * math.sqrt(total) if total else 0.0
    value = fmean(first) - fmean(second)
    return Estimate(value, value - half_width, value + half_width)


def t_quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    places = np.arange(0, _INTEGRAL_END, _INTEGRAL_STEP) + _INTEGRAL_STEP / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(places**2 / freedom))
    return float(places[np.searchsorted(np.cumsum(density) * _INTEGRAL_STEP, _CONFIDENCE / 2)])
