"""The result of a benchmark, the file that keeps it with its provenance, and how it is printed.

A line of docs/results.jsonl is one record and is never changed: a newer record of the same name takes its
place in the table of docs/results.md.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horovod_volo.bench.comparison import Samples, estimate
from horovod_volo.core.environment import code_commit
from horovod_volo.core.errors import UserError

RESULTS = Path(__file__).parents[2] / "docs" / "results.jsonl"
_PER_SECOND = {"s": 1.0, "ms": 1e3, "µs": 1e6}

Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number; of repeated measurements with the 95 % interval of their median or mean."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, samples: Samples, unit: str) -> Figure:
        """Return the median of repeated measurements."""
        found = estimate(samples)
        return cls(label, found.value, unit, found.low, found.high)

    @classmethod
    def of_seconds(cls, label: str, seconds: Samples, unit: str = "ms") -> Figure:
        """Return the median of times, converted from seconds."""
        return cls.of(label, _PER_SECOND[unit] * np.asarray(seconds), unit)

    @classmethod
    def of_rate(cls, label: str, seconds: Samples, images: float = 1) -> Figure:
        """Return the median of images per second, from the seconds that `images` images took."""
        return cls.of(label, images / np.asarray(seconds), "images/s")


@dataclass(frozen=True)
class Result:
    """What one benchmark measured; the newest result of a name is the one that is shown."""

    name: str
    title: str
    figures: list[Figure]


def record_of(result: Result, command: str, load: Sequence[float]) -> Record:
    """Add to a result its date, commit, hardware, system load and command."""
    return {
        "name": result.name,
        "title": result.title,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": code_commit(),
        "hardware": _hardware(),
        "load": [round(value, 2) for value in load],  # runnable processes before and after
        "command": command,
        "figures": [asdict(figure) for figure in result.figures],
    }


def append(record: Record, path: Path = RESULTS) -> None:
    """Append a record to the results."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Record from a checkout of the project."
        ) from None


def read_records(path: Path = RESULTS) -> list[Record]:
    """Read all records, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _hardware() -> dict[str, str | int]:
    gpus = torch.cuda.device_count()
    processor = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    return {
        "cpu": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none",
    }


def lines(record: Record) -> str:
    """Format one record for the terminal."""
    width = max(len(figure["label"]) for figure in record["figures"])
    rows = [f"  {figure['label']:<{width}}  {_shown(figure)}" for figure in record["figures"]]
    before, after = record["load"]
    last = f"  on {_shown_hardware(record)}; load {before} to {after}"
    return "\n".join([f"{record['name']}: {record['title']}", *rows, last])


def table() -> str:
    """Format the recorded results as Markdown."""
    return markdown(read_records())


def markdown(records: list[Record]) -> str:
    """Format the newest record of each name as a Markdown table, sorted by name."""
    newest = {record["name"]: record for record in records}
    rows = [("Measured", "Value", "On", "With", "At"), ("---",) * 5]
    for _, record in sorted(newest.items()):
        title, at = f"**{record['name']}**: {record['title']}", f"{record['commit']}, {record['date']}"
        rows.append((title, "", _shown_hardware(record), f"`{record['command']}`", at))
        rows += [(figure["label"], _shown(figure), "", "", "") for figure in record["figures"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown_hardware(record: Record) -> str:
    where = record["hardware"]
    gpu = "" if where["gpu"] == "none" else f"{where['gpu']}, "
    return f"{gpu}{where['cpu']}, cores: {where['cores']}, compute threads a rank: {where['threads']}"


def _shown(figure: dict[str, Any]) -> str:
    interval = ""
    if figure["low"] is not None:
        interval = f" ({_number(figure['low'])} to {_number(figure['high'])})"
    return f"{_number(figure['value'])} {figure['unit']}{interval}".rstrip()


def _number(value: float) -> str:
    """Format counts in full, other numbers with three significant digits and without exponent."""
    if abs(value) >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
