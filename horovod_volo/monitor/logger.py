"""What the engine logs to, `RunLogger` on rank 0 and elsewhere a `Logger`, which writes nothing; and what is
logged first of all: metrics.jsonl, with one JSON object per log point and evaluation.

What a resumed run must know of its past, such as the hours of training so far, is read from metrics.jsonl.
Invariants: what is appended to a file is written in its order, each part once, also after a time in which the
file could not be written. After a resume, no record later than the resumed step remains.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from horovod_volo.core.atomic_file import MayWrite, atomic_write

METRICS = "metrics.jsonl"
TRAIN, EVALUATION = "train", "evaluation"  # kinds of records

HparamValue = bool | float | str
MetricsRecord = dict[str, Any]
Values = dict[str, float | int]


class Picture(NamedTuple):
    """An encoded PNG image in colours."""

    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class RunDescription:
    """What TensorBoard shows of a run besides its curves and pictures."""

    texts: Mapping[str, str]  # name -> Markdown
    hparams: Mapping[str, HparamValue]
    scores: Sequence[str]  # metrics of an evaluation, the most important first


class Logger:
    """Writes nothing. What is drawn or counted for a logger is given as a function, which others call."""

    def log(self, *lines: str) -> None:
        """Print lines and append them to log.txt. A line break within one, as in a name, is escaped."""

    def write_file(self, name: str, content: str) -> None:
        """Write a file into the run folder."""

    def step_done(self, step: int) -> None:
        """Show the progress of training, if it is time; log what the first steps take."""

    def evaluating(self, done: int, total: int) -> None:
        """Show the progress of an evaluation, if it is time; `done` is 0 when it begins."""

    def log_training(self, step: int, values: Values) -> None:
        """Log the training metrics of a log point."""

    def log_evaluation(self, step: int, values: Values) -> None:
        """Log the metrics of an evaluation."""

    def log_ranks(self, step: int, values: Mapping[str, float]) -> None:
        """Log times of all ranks, by tag, to TensorBoard alone."""

    def log_pictures(self, step: int, group: str, draw: Callable[[], Mapping[str, Picture]]) -> None:
        """Log pictures by name to TensorBoard alone."""

    def describe(self, step: int, describe: Callable[[], RunDescription]) -> None:
        """Log what the run is to TensorBoard, once for each time that it is started."""

    def finish(self, step: int) -> None:
        """Note that the run has reached its last step."""

    def go_back(self, step: int) -> None:
        """Forget the metrics of steps later than `step`, which will be trained again."""

    def close(self) -> None:
        """Flush and close files."""


class AppendedFile:
    """A file that is appended to. What cannot be written now is kept, and written with what comes next."""

    def __init__(self, path: Path, header: bytes = b"", may_write: MayWrite = lambda: None) -> None:
        """`header` is what a new file begins with; `may_write` raises an error if this process must not."""
        self.path, self._header, self._may_write = path, header, may_write
        self._kept = bytearray()

    @property
    def lacks(self) -> int:
        """Return the number of bytes that are not in the file yet."""
        return len(self._kept)

    def renew(self) -> None:
        """Put a copy with a whole last line in the file's place: late writes go to the file of before."""
        if self.path.exists():
            content = self.path.read_bytes()
            with atomic_write(self.path, self._may_write) as file:
                file.write(content if content[-1:] in (b"", b"\n") else content + b"\n")

    def append(self, content: bytes) -> None:
        """Append; raise OSError if that is not possible now. A file that was removed is made again."""
        self._may_write()  # a run folder that was removed has its lock again from here on
        self._kept += content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            self._may_write()  # since the file is open: whoever takes the run folder over renews it
            if not file.tell():
                self._kept[:0] = self._header
            while self._kept:
                del self._kept[: file.write(self._kept)]


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read the intact records of a file, the last of each kind and step: killed runs repeat an evaluation."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    parsed = filter(None, map(parsed_line, lines))
    records = (record for record in parsed if isinstance(record.get("step"), int | float))
    return list({(record["step"], kind_of(record)): record for record in records}.values())


def kind_of(record: MetricsRecord) -> str:
    """Return whether a record is of a log point of training or of an evaluation."""
    return TRAIN if "lr" in record else EVALUATION


def drop_records_after(path: Path, step: int, may_write: MayWrite = lambda: None) -> list[MetricsRecord]:
    """Return the records up to `step`; remove damaged lines and later ones, which will be trained again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    if path.exists():
        with atomic_write(path, may_write) as file:
            file.writelines(f"{json.dumps(record)}\n".encode() for record in kept)
    return kept


def last_values(path: Path) -> MetricsRecord:
    """Return the last value of each metric so far."""
    found: MetricsRecord = {}
    for record in read_metrics(path):
        found |= record
    return found


def parsed_line(line: bytes) -> MetricsRecord | None:
    """Return a line's record; None for a line that was written in part, or damaged."""
    with suppress(ValueError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None
