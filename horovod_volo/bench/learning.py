"""What a network learns here, beside timm's own train.py: the same images, network and recipe, several seeds.

Every run is a process of its own, one after another on all cores that this one may use. A finished run stays
in its folder, and the same command given again reads it: more seeds may be added later.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from time import perf_counter

from horovod_volo.bench.learning_commands import Budget, our_command, timm_command
from horovod_volo.bench.learning_found import Learned, read_ours, read_timm
from horovod_volo.bench.means import Mean, difference_of, mean_of
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.models.volo import SIZES

_FINISHED = "finished.json"
_LOG = "output.txt"


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    name: str
    short: str  # of its runs' folders

    def folder(self, output: str, seed: int) -> Path:
        """Return the folder of a run."""
        return Path(output) / f"{self.short}_seed{seed}"


TIMM = Side("timm's train.py", "timm")
OURS = Side("ours", "ours")
LABELLED = Side("ours with token labels", "labelled")


def measure(
    *,
    against: str,  # noqa: ARG001  # timm is the only choice so far
    data_dir: str,
    timm: str,
    token_label_data: str,
    seeds: Sequence[int],
    output: str,
    model: str,
    img_size: int,
    batch_size: int,
    epochs: int,
    lr: float,
) -> Result:
    """Train every side from every seed; return means over the seeds."""
    _check(model, timm, seeds)
    classes, images = _count(data_dir, batch_size)
    data_dir = str(Path(data_dir).resolve())
    budget = Budget(data_dir, classes, epochs * images, model, img_size, batch_size, epochs, lr)
    sides = [TIMM, OURS, *([LABELLED] if token_label_data else [])]
    runs: dict[Side, list[Learned]] = {side: [] for side in sides}
    for seed in seeds:
        for side in sides:
            folder = side.folder(output, seed)
            if side is TIMM:
                command = timm_command(budget, str(Path(timm).resolve()), seed, folder)
            else:
                labels = token_label_data if side is LABELLED else ""
                command = our_command(budget, seed, folder, labels)
            seconds = run_once(command, folder)
            read = read_timm if side is TIMM else read_ours
            runs[side].append(read(folder, seconds, budget))
            print(f"{side.name}, seed {seed}: {runs[side][-1]}", file=sys.stderr, flush=True)
    title = (
        f"{model} at {img_size} px, {epochs} epochs, batch {batch_size}; means over {len(seeds)} seeds with "
        "95 % intervals"
    )
    return Result("learning", title, _figures(runs))


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
    """Return how many classes there are, and how many images an epoch trains on: whole batches."""
    for split in ("val", "train"):
        with closing(build_catalog(data_dir, split, folder=None)) as catalog:
            classes, images = len(catalog.classes), len(catalog)
    if images < batch_size:
        raise UserError(f"{data_dir} has {images} training images. Use --batch-size {images} or less.")
    return classes, images // batch_size * batch_size


def run_once(command: list[str], folder: Path) -> float:
    """Run a command that leaves its results in `folder`, unless it has; return how many seconds it took."""
    finished = folder / _FINISHED
    if finished.exists():
        found = json.loads(finished.read_text(encoding="utf-8"))
        if found["command"] != command:
            raise UserError(f"{folder} holds a run of other settings. Give another --output.")
        return float(found["seconds"])
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
    folder.mkdir(parents=True)
    began = perf_counter()
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = perf_counter() - began
    if status:
        raise RuntimeError(f"a run ended with status {status}: {folder / _LOG} tells why")
    with atomic_write(finished) as file:
        file.write(json.dumps({"command": command, "seconds": seconds}).encode())
    return seconds


def _figures(runs: dict[Side, list[Learned]]) -> list[Figure]:
    figures = []
    for side, learned in runs.items():
        top1 = [run.top1 for run in learned]
        figures += [
            _figure(f"{side.name}: top-1", mean_of(top1), "%"),
            Figure(f"{side.name}: standard deviation of top-1", stdev(top1), "points"),
            _figure(f"{side.name}: held-out loss", mean_of([run.held_out_loss for run in learned]), ""),
            _figure(f"{side.name}: training loss, last epoch", mean_of([run.loss for run in learned]), ""),
            _figure(f"{side.name}: images a second", mean_of([run.images_per_second for run in learned]), ""),
            _figure(f"{side.name}: minutes", mean_of([run.minutes for run in learned]), ""),
        ]
        if side is not TIMM:
            gained = difference_of(top1, [run.top1 for run in runs[TIMM]])
            figures.append(_figure(f"{side.name}: top-1 above timm's", gained, "points"))
    return figures


def _figure(label: str, found: Mean, unit: str) -> Figure:
    return Figure(label, found.value, unit, found.low, found.high)
