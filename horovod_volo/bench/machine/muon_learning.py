"""Accuracy of Muon and of AdamW after equal training: the same images, network, steps and settings.

Each side first trains once at every learning rate, with a seed of its own, and takes the one with the highest
top-1; the seeds are then trained at these. Both sides have as many trials. Finished runs are not repeated.
The learning rate is chosen on the images that top-1 is measured on, which favours neither side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from horovod_volo.bench.cli import BatchSize, Flag, ImgSize
from horovod_volo.bench.machine.learning import (
    MODEL,
    Budget,
    count,
    mean_difference,
    our_command,
    read_ours,
    run_once,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError

_SIDES = {"AdamW": "adamw", "Muon": "muon"}  # names in figures, and values of --opt
_SWEEP_SEED = 0
_RATES = (1.5e-4, 5e-4, 1.5e-3, 4.5e-3)


class _TrainedRun(NamedTuple):
    curve: list[float]  # top-1 after each epoch, per cent
    held_out_loss: float
    minutes: float

    @property
    def top1(self) -> float:
        return self.curve[-1]


def measure(
    *,
    data_dir: Annotated[str, Flag("folder with train/CLASS/IMAGE and val/CLASS/IMAGE", positional=True)],
    rates: Annotated[Sequence[float], Flag("peak learning rates that both sides try")] = _RATES,
    seeds: Annotated[Sequence[int], Flag("seeds, one run of each side for each")] = (1, 2, 3),
    output: Annotated[str, Flag("folder of the runs; finished runs are not repeated")] = "runs/muon",
    img_size: ImgSize = 32,
    batch_size: BatchSize = 64,
    epochs: Annotated[int, Flag("epochs; the first is the warm-up")] = 5,
) -> Result:
    """Train both sides at their best learning rates from every seed; return means over the seeds."""
    if len(set(seeds)) < len(seeds) or len(seeds) < 2 or _SWEEP_SEED in seeds:
        raise UserError(f"--seeds takes two or more, each once, and not {_SWEEP_SEED}, which the rates have.")
    classes, images = count(data_dir, batch_size)
    data_dir = str(Path(data_dir).resolve())
    budget = Budget(data_dir, classes, epochs * images, img_size, batch_size, epochs, lr=0.0)
    figures, curves = list[Figure](), dict[str, list[_TrainedRun]]()
    for side in _SIDES:
        tried = {lr: _train(budget._replace(lr=lr), side, _SWEEP_SEED, Path(output)) for lr in rates}
        best = max(tried, key=lambda lr: tried[lr].top1)
        figures += [Figure(f"{side}: top-1 at {lr:g}, one run", run.top1, "%") for lr, run in tried.items()]
        curves[side] = [_train(budget._replace(lr=best), side, seed, Path(output)) for seed in seeds]
        figures += _figures(f"{side} at {best:g}", curves[side])
    muon, adamw = ([run.top1 for run in curves[side]] for side in ("Muon", "AdamW"))
    gained = mean_difference(muon, adamw)
    figures.append(Figure("Muon: top-1 above AdamW's", gained.value, "points", gained.low, gained.high))
    title = f"{MODEL} at {img_size} px, {epochs} epochs, batch {batch_size}; means over {len(seeds)} seeds"
    return Result("muon learning", f"{title} with 95 % intervals", figures)


def _train(budget: Budget, side: str, seed: int, output: Path) -> _TrainedRun:
    folder = output / f"{_SIDES[side]}_{budget.lr:g}_seed{seed}"
    seconds = run_once([*our_command(budget, seed, folder, ""), "--opt", _SIDES[side]], folder)
    last = read_ours(folder, seconds, budget)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    curve = [record["top1"] for record in map(json.loads, lines) if "top1" in record]
    run = _TrainedRun(curve, last.held_out_loss, last.minutes)
    print(f"{side} at {budget.lr:g}, seed {seed}: {run}", file=sys.stderr, flush=True)
    return run


def _figures(side: str, runs: Sequence[_TrainedRun]) -> list[Figure]:
    epochs = range(len(runs[0].curve))
    columns = {
        f"top-1 after epoch {epoch + 1}": ([run.curve[epoch] for run in runs], "%") for epoch in epochs
    }
    columns |= {
        "held-out loss": ([run.held_out_loss for run in runs], ""),
        "minutes": ([run.minutes for run in runs], ""),
    }
    means = {label: (mean_difference(values), unit) for label, (values, unit) in columns.items()}
    return [
        Figure(f"{side}: {label}", mean.value, unit, mean.low, mean.high)
        for label, (mean, unit) in means.items()
    ]
