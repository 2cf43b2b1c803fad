"""What a run of either side leaves in its folder, read into the same few numbers."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from horovod_volo.bench.learning_commands import Budget


@dataclass(frozen=True)
class Learned:
    """What one run came to."""

    top1: float  # per cent, after the last epoch
    held_out_loss: float
    loss: float  # of training, mean over the last epoch
    images_per_second: float  # trained on, over the whole run: evaluations and the start are in its time
    minutes: float

    def __str__(self) -> str:
        """Word it for the terminal."""
        return f"top-1 {self.top1:.2f} %, training loss {self.loss:.3f}, {self.minutes:.1f} minutes"


def read_timm(folder: Path, seconds: float, budget: Budget) -> Learned:
    """Read the summary.csv of timm's script."""
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    _check_epochs(len(rows), folder, budget)
    last = rows[-1]
    return _learned(
        float(last["eval_top1"]), float(last["eval_loss"]), float(last["train_loss"]), seconds, budget
    )


def read_ours(folder: Path, seconds: float, budget: Budget) -> Learned:
    """Read our metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    trained = [record for record in records if "lr" in record]
    evaluated = [record for record in records if "top1" in record]
    _check_epochs(len(evaluated), folder, budget)
    # A record's loss is the mean since the one before; an epoch ends with a record.
    before = max((record["step"] for record in trained if record["epoch"] < budget.epochs - 1), default=0)
    total, step = 0.0, before
    for record in trained:
        if record["epoch"] == budget.epochs - 1:
            total += record["loss"] * (record["step"] - step)
            step = record["step"]
    last = evaluated[-1]
    return _learned(last["top1"], last["loss"], total / (step - before), seconds, budget)


def _check_epochs(found: int, folder: Path, budget: Budget) -> None:
    if found != budget.epochs:
        raise RuntimeError(f"{folder} has results of {found} epochs, not of {budget.epochs}")


def _learned(top1: float, held_out_loss: float, loss: float, seconds: float, budget: Budget) -> Learned:
    return Learned(top1, held_out_loss, loss, budget.images / seconds, seconds / 60)
