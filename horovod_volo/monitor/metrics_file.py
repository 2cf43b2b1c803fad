"""metrics.jsonl, one JSON object per log point and evaluation, and files that are appended to, as it is.

What a resumed run must know of its past, such as the hours of training so far, is read from metrics.jsonl.
Invariants: what is appended is written in its order, each part once, also after a time in which the file
could not be written. After a resume, no record later than the resumed step remains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import atomic_write

METRICS = "metrics.jsonl"
TRAIN, EVALUATION = "train", "evaluation"  # kinds of records

MetricsRecord = dict[str, Any]


class AppendedFile:
    """A file that is appended to. What cannot be written now is kept, and written with what comes next."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        """`header` is what a new file begins with."""
        self.path, self._header = path, header
        self._kept = bytearray()

    @property
    def lacks(self) -> int:
        """Return the number of bytes that are not in the file yet."""
        return len(self._kept)

    def append(self, content: bytes) -> None:
        """Append; raise OSError if that is not possible now. A file that was removed is made again."""
        self._kept += content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            if not file.tell():
                self._kept[:0] = self._header
            while self._kept:
                del self._kept[: file.write(self._kept)]


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read the records of a file, without lines that are damaged; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for line in lines if (record := _parsed(line)) is not None]


def kind_of(record: MetricsRecord) -> str:
    """Return whether a record is of a log point of training or of an evaluation."""
    return TRAIN if "lr" in record else EVALUATION


def drop_records_after(path: Path, step: int) -> None:
    """Remove the records of steps later than `step`, which will be trained again, and damaged lines."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    kept = [line for line in lines if (record := _parsed(line)) is not None and record["step"] <= step]
    with atomic_write(path) as file:
        file.writelines(line + b"\n" for line in kept)


def last_values(path: Path) -> MetricsRecord:
    """Return the last value of each metric so far."""
    found: MetricsRecord = {}
    for record in read_metrics(path):
        found |= record
    return found


def _parsed(line: bytes) -> MetricsRecord | None:
    """Return a line's record; None for a line that was written in part, or damaged."""
    try:
        record: Any = json.loads(line)
        float(record["step"])
    except (ValueError, KeyError, TypeError):
        return None
    return record if isinstance(record, dict) else None
