"""The benchmarks of one GPU in parts of at most eight minutes, the most telling first.

Each benchmark is a process of its own, and is recorded as soon as it has ended: one that fails or takes too
long costs nothing else, and the next call continues with what is not measured yet.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch

from horovod_volo.bench.cli import Flag
from horovod_volo.core.errors import UserError

_STEP = "--precision bf16 --img-size 224"
_D1 = f"--model volo_d1 --batch-size 256 --drop-path 0.1 {_STEP}"
_D5 = f"--model volo_d5 --batch-size 128 {_STEP}"
_D5_SLOW = f"{_D5} --drop-path 0.1"  # computes nearly all branches
_D2, _D3, _D4 = _D1.replace("d1", "d2"), _D1.replace("d1", "d3"), _D5_SLOW.replace("d5", "d4")
# Seconds that each may take, and its command line. The batch sizes fit into the memory of 80 GB.
PARTS: dict[str, Sequence[tuple[int, str]]] = {
    "ceilings": [(120, "ceilings"), (60, "loss --batch-sizes 128")],
    "d1": [
        (90, f"step {_D1}"),
        (150, f"peers {_D1} --against eager published"),
        (180, f"step {_D1} --compile"),
    ],
    "d1-compiled": [(90, f"step {_D1} --kernels plain"), (240, f"peers {_D1} --against compile")],
    "d5": [
        (120, f"step {_D5} --drop-path 0.75"),
        (120, f"step {_D5_SLOW}"),
        (240, f"peers {_D5_SLOW} --against eager published"),
    ],
    "d5-compiled": [
        (200, f"step {_D5} --drop-path 0.75 --compile"),
        (240, f"peers {_D5_SLOW} --against compile"),
    ],
    "profile": [
        (90, f"profile {_D1}"),
        (120, f"step {_D1.replace('256', '64')}"),
    ],
    **{
        size: [(100, f"step {flags}"), (180, f"peers {flags} --against eager")]
        for size, flags in (("d2", _D2), ("d3", _D3), ("d4", _D4))
    },
    "d2-d3-compiled": [(240, f"peers {_D2} --against compile"), (240, f"peers {_D3} --against compile")],
    "d4-compiled": [(240, f"peers {_D4} --against compile")],
    "large": [
        (120, f"step {_D5_SLOW.replace('224', '448').replace('128', '64')}"),
        (120, f"step {_D5_SLOW.replace('224', '512').replace('128', '48')}"),
    ],
}


def measure(
    *,
    parts: Annotated[Sequence[str], Flag(f"of {', '.join(PARTS)}")],
    out: Annotated[str, Flag("folder of results.jsonl and log.txt")] = "runs/gpu",
) -> str:
    """Measure parts of the plan; return what was measured and what failed."""
    if unknown := sorted(set(parts) - PARTS.keys()):
        raise UserError(f"There is no part {', '.join(unknown)}. The parts are {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here. `python -m horovod_volo.doctor` says why.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    measured, failed = folder / "measured.txt", 0
    measured.touch()
    for limit, words in (line for part in parts for line in PARTS[part]):
        if words in measured.read_text(encoding="utf-8").splitlines():
            continue
        began = perf_counter()
        outcome = _run(folder, limit, words)
        print(f"{perf_counter() - began:4.0f} s  {outcome}  {words}", flush=True)
        failed += outcome != "measured"
        if outcome == "measured":
            with measured.open("a", encoding="utf-8") as file:
                file.write(f"{words}\n")
    if failed:
        raise UserError(f"{failed} benchmarks failed: see {folder / 'log.txt'}. Others are in {folder}.")
    return f"All results are in {folder}."


def _run(folder: Path, limit: int, words: str) -> str:
    """Run one benchmark; return whether it was measured."""
    command = [sys.executable, "-m", "horovod_volo.bench", *words.split()]
    is_table = words.startswith("profile")
    with (folder / "results.jsonl").open("a") as results, (folder / "log.txt").open("a") as log:
        print(f"== {words}", file=log, flush=True)
        try:
            subprocess.run(
                command if is_table else [*command, "--json"],
                stdout=log if is_table else results,
                stderr=log,
                timeout=limit,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return "took too long"
        except subprocess.CalledProcessError as error:
            return f"failed with status {error.returncode}"
    return "measured"
