"""A race to an accuracy: wall time from the command to a top-1 on held-out images, beside timm's train.py.

Each run is a command that a user types, alone on its cores; the two sides alternate. The clock starts with
the command and stops when the record of the first evaluation at or above the target is in the run's file, so
starting, reading images and all evaluations count. A run goes on to its end, for the accuracy at other times.
"""

import csv
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, NamedTuple

import numpy as np

from horovod_volo.bench.results import Figure, Flag, Result
from horovod_volo.core.errors import UserError
from horovod_volo.monitor.logger import EVALUATION, METRICS, kind_of, read_metrics

_POLL_SECONDS = 0.1
_LAST_LINES = 15  # of the output of a run that fails


class TimedScore(NamedTuple):
    seconds: float  # since the command
    top1: float


Curve = list[TimedScore]


def measure(
    data: Annotated[str, Flag("folder with train/CLASS/IMAGE and val/CLASS/IMAGE")],
    *,
    target: Annotated[float, Flag("top-1 to reach, in percent")] = 60.0,
    seeds: Annotated[Sequence[int], Flag("seeds, one run of each side for each")] = (1, 2, 3, 4, 5),
    ours: Annotated[str, Flag("flags of our side")] = "--from-scratch",
    ranks: Annotated[int, Flag("ranks of our side")] = 1,
    theirs: Annotated[str, Flag("flags of timm's side")] = "",
    timm: Annotated[str, Flag("checkout of timm, whose train.py runs; empty: our side alone")] = "",
) -> Result:
    """Race our trainer against timm's."""
    if timm and not (Path(timm) / "train.py").is_file():
        raise UserError(
            f"{timm} has no train.py. Clone huggingface/pytorch-image-models, and name its folder."
        )
    data, sides = str(Path(data).resolve()), ("ours", "timm") if timm else ("ours",)
    found: dict[str, list[Curve]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            for side in sides if number % 2 == 0 else reversed(sides):
                output = Path(folder) / f"{side}_{number}"
                if side == "ours":
                    command = our_command(data, output, seed, ranks, shlex.split(ours))
                    scores = partial(our_scores, output / "run" / METRICS)
                else:
                    command = timm_command(data, output, seed, timm, shlex.split(theirs))
                    scores = partial(timm_scores, output / "run" / "summary.csv")
                curve = watched(command, scores, output)
                found[side].append(curve)
                points = " ".join(f"{each.seconds:.1f} s {each.top1:.2f} %" for each in curve)
                print(f"{side}, seed {seed}: {points}", file=sys.stderr, flush=True)
    title = f"wall time to a top-1 of {target:g} % on {Path(data).name}, ranks: {ranks}, seeds: {list(seeds)}"
    return Result(f"race {Path(data).name} {ours}", title, figures_of(found, target))


def our_command(data: str, output: Path, seed: int, ranks: int, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "horovod_volo.train", data, "--ranks", str(ranks), *flags]
    return [*command, "--seed", str(seed), "--output", str(output), "--name", "run"]


def timm_command(data: str, output: Path, seed: int, timm: str, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "horovod_volo.bench.timm_train", timm, "--data-dir", data, *flags]
    return [*command, "--seed", str(seed), "--output", str(output), "--experiment", "run"]


def our_scores(file: Path) -> list[float]:
    """Return the top-1 of each evaluation so far, of the averaged weights if there are any, as timm's is."""
    evaluations = (each for each in read_metrics(file) if kind_of(each) == EVALUATION)
    return [float(each["ema_top1" if "ema_top1" in each else "top1"]) for each in evaluations]


def timm_scores(file: Path) -> list[float]:
    """Return the top-1 of each evaluation so far."""
    text = file.read_text() if file.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [float(row["eval_top1"]) for row in rows]


def watched(command: Sequence[str], scores: Callable[[], list[float]], output: Path) -> Curve:
    """Run a command to its end, and note when each of its evaluations is recorded."""
    output.mkdir()
    curve, began = Curve(), monotonic()
    with (output / "output.txt").open("w+") as text:
        process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT)
        try:
            while True:
                has_ended, seconds = process.poll() is not None, monotonic() - began
                curve += [TimedScore(seconds, top1) for top1 in scores()[len(curve) :]]
                if has_ended:
                    break
                sleep(_POLL_SECONDS)
        finally:
            process.terminate()
            process.wait()
        text.seek(0)
        if process.returncode:
            sys.stderr.writelines(text.readlines()[-_LAST_LINES:])
            raise UserError(f"The lines above end the output of a run that failed: {shlex.join(command)}")
    if not curve:
        raise UserError(f"A run evaluated nothing: {shlex.join(command)}")
    return curve


def seconds_to(curve: Curve, target: float) -> float:
    """Return the seconds to the first evaluation at or above a target; infinite if there is none."""
    return next((each.seconds for each in curve if each.top1 >= target), float("inf"))


def best_until(curve: Curve, seconds: float) -> float:
    """Return the best top-1 of the evaluations in the first seconds."""
    return max((each.top1 for each in curve if each.seconds <= seconds), default=0.0)


def figures_of(found: dict[str, list[Curve]], target: float) -> list[Figure]:
    """Return each side's runs that reached the target, its time and its accuracy, and what both give."""
    figures, times = list[Figure](), dict[str, list[float]]()
    for side, curves in found.items():
        times[side] = [seconds for each in curves if (seconds := seconds_to(each, target)) < float("inf")]
        best = [best_until(each, float("inf")) for each in curves]
        figures.append(Figure(f"{side}: runs to {target:g} %", len(times[side]), f"of {len(curves)}"))
        figures.append(Figure.of(f"{side}: best top-1", best, "%"))
        if len(times[side]) == len(curves):
            figures.append(Figure.of(f"{side}: to {target:g} %", times[side], "s"))
    if "timm" in found:
        ends = [curve[-1].seconds for curve in found["timm"]]
        at_equal_time = [best_until(*each) for each in zip(found["ours"], ends, strict=True)]
        figures.append(Figure.of("ours, when timm's run ends", at_equal_time, "%"))
        if len(times["ours"]) == len(times["timm"]) == len(ends):
            figures.append(Figure.of("sooner than timm", np.divide(times["timm"], times["ours"]), "x"))
    return figures
