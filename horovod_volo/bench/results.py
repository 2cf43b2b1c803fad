"""What a benchmark found, with what produced it, and the one file where it is kept.

A line of docs/results.jsonl is one object and is never changed: a newer one of the same name takes
its place in the table.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from horovod_volo.bench.pairs import Estimate, estimate
from horovod_volo.core.environment import code_commit
from horovod_volo.core.errors import UserError

RESULTS = Path(__file__).parents[2] / "docs" / "results.jsonl"

Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number; what was measured several times has the interval of its median."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, samples: Sequence[float], unit: str) -> Figure:
        """Make a figure of repeated measurements."""
        return cls.of_estimate(label, estimate(samples), unit)

    @classmethod
    def of_estimate(cls, label: str, found: Estimate, unit: str) -> Figure:
        """Make a figure of a median and its interval."""
        return cls(label, found.median, unit, found.low, found.high)


@dataclass(frozen=True)
class Result:
    """What one benchmark found; results of one name are of one thing, so the newest counts."""

    name: str
    title: str
    figures: list[Figure]


def record_of(result: Result, command: str, load: Sequence[float]) -> Record:
    """Join a result with when, of what code, where, and how it came about."""
    return {
        "name": result.name,
        "title": result.title,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": code_commit(),
        "hardware": hardware(),
        "load": [round(value, 2) for value in load],  # runnable processes before and after
        "command": command,
        "figures": [asdict(figure) for figure in result.figures],
    }


def append(record: Record, path: Path = RESULTS) -> None:
    """Add a line to the results."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Record from a checkout of the project."
        ) from None


def read_records(path: Path = RESULTS) -> list[Record]:
    """Read all results, oldest first; none where none were kept."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def hardware() -> dict[str, str | int]:
    """Tell the processor, how many of its cores and threads were used, and the GPU."""
    gpus = torch.cuda.device_count()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
