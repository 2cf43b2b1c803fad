"""metrics.jsonl: one JSON object per log point and evaluation. What a resumed run must know of its past, such
as the hours of training so far, is read from here.

Invariant: after a resume, no record later than the resumed step remains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from horovod_volo.core.atomic_file import atomic_write

METRICS = "metrics.jsonl"

MetricsRecord = dict[str, Any]


class RunSoFar(NamedTuple):
    """What counts on from one part of a run to the next."""

    hours: float = 0.0
    skipped_steps: int = 0


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read the records of a file, without lines that are damaged; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for line in lines if (record := _parsed(line)) is not None]


def drop_records_after(path: Path, step: int) -> None:
    """Remove the records of steps later than `step`, which will be trained again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    records = [(line, _parsed(line)) for line in lines]
    with atomic_write(path) as file:
        kept = (line + b"\n" for line, record in records if record is not None and record["step"] <= step)
        file.write(b"".join(kept))


def progress_so_far(path: Path) -> RunSoFar:
    """Return what the last records count."""
    hours, skipped = 0.0, 0
    for record in read_metrics(path):
        hours = float(record.get("hours", hours))
        skipped = int(record.get("skipped_steps", skipped))
    return RunSoFar(hours, skipped)


def is_of_training(record: MetricsRecord) -> bool:
    """Return whether a record is of a log point, not of an evaluation."""
    return "lr" in record


def _parsed(line: bytes) -> MetricsRecord | None:
    """Return a line's record; None for a line that was written in part, or damaged."""
    try:
        record: Any = json.loads(line)
        float(record["step"])
    except (ValueError, KeyError, TypeError):
        return None
    return record if isinstance(record, dict) else None
