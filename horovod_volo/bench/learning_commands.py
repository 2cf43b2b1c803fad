"""One recipe in two spellings: the command lines of timm's train.py and of our trainer.

Invariant: both lines ask for the same. What timm has no flag for is at timm's value in ours.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_RANDAUGMENT = "rand-m9-mstd0.5-inc1"


@dataclass(frozen=True)
class Budget:
    """What both sides are given."""

    data_dir: str
    classes: int
    images: int  # trained on in all epochs together
    model: str
    img_size: int
    batch_size: int
    epochs: int
    lr: float


def timm_command(budget: Budget, checkout: str, seed: int, folder: Path) -> list[str]:
    """Return the command that trains timm's network by timm's script."""
    side = str(budget.img_size)
    network = ["--model", budget.model, "--num-classes", str(budget.classes), "--input-size", "3", side, side]
    network += ["--model-kwargs", f"img_size={side}", "use_aux_head=False"]
    images = ["--data-dir", budget.data_dir, "--val-split", "val", "-b", str(budget.batch_size)]
    images += ["--workers", str(len(os.sched_getaffinity(0))), "--crop-pct", "1.0"]
    images += ["--scale", "0.3", "1.0", "--aa", _RANDAUGMENT, "--reprob", "0.25"]
    # The learning rate moves with every step, as ours does.
    update = ["--opt", "adamw", "--sched", "cosine", "--sched-on-updates", "--epochs", str(budget.epochs)]
    update += [*_rates(budget), "--clip-grad", "1.0", "--smoothing", "0.1"]
    place = ["--output", str(folder.parent.resolve()), "--experiment", folder.name, "--checkpoint-hist", "1"]
    place += ["--device", "cuda" if torch.cuda.is_available() else "cpu", "--seed", str(seed)]
    script = [sys.executable, "-m", "horovod_volo.bench.peers_learning", checkout]
    return [*script, *network, *images, *update, *place]


def our_command(budget: Budget, seed: int, folder: Path, token_label_data: str) -> list[str]:
    """Return the command that trains our network, with token labels where their folder is given."""
    network = ["--model", budget.model, "--img-size", str(budget.img_size)]
    images = ["-b", str(budget.batch_size), "--crop-pct", "1.0"]
    images += ["--scale", "0.3", "1.0", "--aa", _RANDAUGMENT, "--reprob", "0.25"]
    update = ["--opt", "adamw", "--epochs", str(budget.epochs), "--cooldown-epochs", "0"]
    update += [*_rates(budget), "--clip-grad", "1.0", "--smoothing", "0.1"]
    objective = ["--no-mix-token"]
    if token_label_data:
        objective += ["--token-label", "--token-label-data", str(Path(token_label_data).resolve())]
        objective += ["--ground-truth"]
    place = ["--output", str(folder.parent.resolve()), "--name", folder.name, "--keep-checkpoints", "1"]
    script = [sys.executable, "-m", "horovod_volo.train", budget.data_dir]
    return [*script, *network, *images, *update, *objective, *place, "--seed", str(seed)]


def _rates(budget: Budget) -> list[str]:
    """Return what both spell alike."""
    warmup = ["--warmup-epochs", "1" if budget.epochs > 1 else "0", "--warmup-lr", "1e-6"]
    return ["--lr", str(budget.lr), *warmup, "--min-lr", "1e-5", "--weight-decay", "0.05"]
