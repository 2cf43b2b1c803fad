"""Training runs of timm's train.py and of our trainer with the same settings, and their results.

Invariant: both command lines ask for the same; what timm has no flag for has timm's value in ours.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError

_FINISHED, _LOG = "finished.json", "output.txt"


class Budget(NamedTuple):
    """What both sides are given."""

    data_dir: str
    classes: int
    images: int  # trained on in all epochs together
    model: str
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


def timm_command(budget: Budget, checkout: str, seed: int, folder: Path) -> list[str]:
    """Return the command that trains timm's network with timm's script."""
    side = str(budget.img_size)
    return [
        *(sys.executable, "-m", "horovod_volo.bench.machine.peers_learning", checkout),
        *("--model", budget.model, "--num-classes", str(budget.classes), "--input-size", "3", side, side),
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
        *("--model", budget.model, "--img-size", str(budget.img_size)),
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
    _check_epochs(len(rows), folder, budget)
    top1, held_out_loss, loss = (float(rows[-1][name]) for name in ("eval_top1", "eval_loss", "train_loss"))
    return RunResult(top1, held_out_loss, loss, budget.images / seconds, seconds / 60)


def read_ours(folder: Path, seconds: float, budget: Budget) -> RunResult:
    """Read our metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    trained = [record for record in records if "lr" in record]
    evaluated = [record for record in records if "top1" in record]
    _check_epochs(len(evaluated), folder, budget)
    # The loss of a record is the mean since the record before; an epoch ends with a record.
    before = max((record["step"] for record in trained if record["epoch"] < budget.epochs - 1), default=0)
    total, step = 0.0, before
    for record in trained:
        if record["epoch"] == budget.epochs - 1:
            total += record["loss"] * (record["step"] - step)
            step = record["step"]
    last = evaluated[-1]
    loss = total / (step - before)
    return RunResult(last["top1"], last["loss"], loss, budget.images / seconds, seconds / 60)


def _check_epochs(found: int, folder: Path, budget: Budget) -> None:
    if found != budget.epochs:
        raise RuntimeError(f"{folder} has results of {found} epochs, not of {budget.epochs}")
