"""Trains small runs, most with an injected fault, and reads what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.ranks.launching import train

# With the 80 images of the fixture `images`, two ranks train ten steps.
SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0")
NEVER = "1:99:SIGKILL"
INJECTED = "tests.faults.injected"


def start(
    images: Path,
    output: Path,
    *flags: str,
    fault: str = NEVER,
    ranks: int = 2,
    start_with: str = "gloo",
    seconds: int = 240,
    plugins: str = INJECTED,
) -> tuple[int, str]:
    """Train into the folder `run` of an output folder; return the exit status and what was printed."""
    arguments = (str(images), *SMALL, "--output", str(output), "--name", "run", "--plugin", plugins, *flags)
    done = train(*arguments, ranks=ranks, start_with=start_with, seconds=seconds, INJECTED_FAULT=fault)
    return done.returncode, done.stdout


def only_error(shown: str, *words: str) -> str:
    """Return the only line with an error that has all these words."""
    (line,) = (each for each in shown.splitlines() if all(word in each for word in ("error", *words)))
    return line


def weights(output: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of the last checkpoint."""
    last = output / "run" / "checkpoints" / "last"
    return {
        f"{file.name} {name}": tensor.numpy().tobytes()
        for file in last.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_finite(checkpoint: Path) -> None:
    """Require that all tensors of a checkpoint are finite."""
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.isfinite().all(), (checkpoint.name, file.name, name)


def records(output: Path) -> list[dict[str, float]]:
    """Return the metrics of the training steps."""
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "lr" in record]


def steps(output: Path) -> list[float]:
    """Return the steps in the metrics."""
    return [record["step"] for record in records(output)]
