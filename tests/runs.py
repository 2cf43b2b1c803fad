"""Trains small runs, on two ranks if not told otherwise, and reads what they leave behind.

A run is in the folder `run` of an output folder, and the functions below take the output folder.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.ranks.launching import train

ADAMW = ("--opt", "adamw", "--lr-base", "0.002")  # not the demo's Muon, whose state is not sharded
SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0")
SMALL += ADAMW
FINISHED, MISTAKE, STOPPED = 0, 2, 75
FAILED = -1  # any status but those of a run that has finished or stopped


def start(
    data: Path,
    output: Path,
    *flags: str,
    small: tuple[str, ...] = SMALL,
    ranks: int = 2,
    start_with: str = "",
    status: int = FINISHED,
    stop_at: int = 0,
    fault: str = "",
    **settings: Any,
) -> str:
    """Train, require the exit status, or the stop at a step, and return what was printed."""
    start_with = start_with or ("gloo" if ranks > 1 else "none")
    arguments = [str(data), *small, "--output", str(output), "--name", "run", *flags]
    if stop_at:
        arguments += ["--stop-at-step", str(stop_at)]
    if fault:
        arguments += ["--plugin", "tests.faults.injected"]
        settings["INJECTED_FAULT"] = fault
    done = train(*arguments, ranks=ranks, start_with=start_with, **settings)
    if stop_at:
        assert f"stopped at step {stop_at} and saved" in done.stdout, done.stdout
        # horovodrun has a status of its own.
        assert start_with == "gloo" or done.returncode == STOPPED, done.stdout
    elif status == FAILED:
        assert done.returncode not in (FINISHED, STOPPED), done.stdout
    else:
        assert done.returncode == status, done.stdout
    return done.stdout


def only_error(shown: str, *words: str) -> str:
    """Return the only line with an error that has all these words."""
    (line,) = (each for each in shown.splitlines() if all(word in each for word in ("error", *words)))
    return line


def records(output: Path, having: str = "") -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, or those that have a value of this name."""
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if not having or having in record]


def steps(output: Path, having: str = "lr") -> list[int]:
    """Return the steps of the records that have a value of this name; all training steps have `lr`."""
    return [record["step"] for record in records(output, having)]


def state(output: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by file and name, as `optimizer head.weight/step`."""
    folder = output / "run" / "checkpoints" / checkpoint
    found = {
        f"{file.stem} {name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("model ") for name in found), f"{folder} has no weights"
    return found


def assert_same_state(expected: Path, found: Path) -> None:
    """Require that the last checkpoints of two runs are equal, bit for bit."""
    assert_same_tensors(state(expected), state(found))


def assert_same_tensors(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Require the same names and, bit for bit, the same tensors."""
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def assert_finite(output: Path, checkpoint: str = "last") -> None:
    """Require that all tensors of a checkpoint are finite."""
    tensors = state(output, checkpoint)
    assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []
