"""Loggers of a run: log.txt, metrics.jsonl (one JSON object per line), TensorBoard and the terminal.

Invariant: after a resume, no record later than the resumed step remains.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import escape_controls
from horovod_volo.monitor.progress import Values
from horovod_volo.monitor.training_progress import RunLength, TrainingProgress

_RGB = 3  # TensorBoard's number of this color space


class Logger(Protocol):
    """What the engine logs to: a `RunLogger` on rank 0, a `NullLogger` on all other ranks."""

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

    def log_picture(self, step: int, name: str, png: bytes, size: tuple[int, int]) -> None:
        """Log a picture of this width and height to TensorBoard alone."""

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        """Log times of one rank to TensorBoard alone."""

    def go_back(self, step: int) -> None:
        """Forget the metrics of steps later than `step`, which will be trained again."""

    def close(self) -> None:
        """Flush and close files."""


class NullLogger:
    """Logger of the ranks that write nothing."""

    def log(self, *lines: str) -> None:
        pass

    def write_file(self, name: str, content: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass

    def evaluating(self, done: int, total: int) -> None:
        pass

    def log_training(self, step: int, values: Values) -> None:
        pass

    def log_evaluation(self, step: int, values: Values) -> None:
        pass

    def log_picture(self, step: int, name: str, png: bytes, size: tuple[int, int]) -> None:
        pass

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        pass

    def go_back(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class RunLogger:
    """Logger of rank 0: appends to the files of a run folder after the first step of `length`.

    `live` rewrites the progress line in place on a terminal. A file that cannot be written, because the disk
    is full or the folder is gone, does not end the run: what it lacks is kept, and written when that is
    possible.
    """

    def __init__(self, folder: Path, length: RunLength, *, live: bool = True) -> None:
        """Open the files; raise OSError if that is not possible."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        _drop_records_after(folder / "metrics.jsonl", length.first_step)
        self._metrics = AppendedFile(folder / "metrics.jsonl")
        self._log = AppendedFile(folder / "log.txt")
        self._events = AppendedFile(_event_file(folder), header=_first_events(length.first_step + 1))
        self._failed = False  # whether the last write did
        for file in (self._metrics, self._log, self._events):
            file.append(b"")
        self._progress = TrainingProgress(length, live=live)

    def log(self, *lines: str) -> None:
        for line in lines:
            self._print(line)
        self._append(self._log, "".join(f"{escape_controls(line)}\n" for line in lines).encode())

    def write_file(self, name: str, content: str) -> None:
        try:
            with atomic_write(self._folder / name) as file:
                file.write(content.encode())
        except OSError as error:
            self._print(f"warning: {self._folder / name} is not written: {error.strerror}")

    def step_done(self, step: int) -> None:
        if message := self._progress.step_done(step):
            self.log(message)

    def evaluating(self, done: int, total: int) -> None:
        self._progress.evaluating(done, total)

    def log_training(self, step: int, values: Values) -> None:
        self._record("train", step, values)
        line = self._progress.format(step, values)
        self._progress.show(line)
        self._append(self._log, f"{line}\n".encode())

    def log_evaluation(self, step: int, values: Values) -> None:
        self._record("evaluation", step, values)

    def log_picture(self, step: int, name: str, png: bytes, size: tuple[int, int]) -> None:
        image = Summary.Image(width=size[0], height=size[1], colorspace=_RGB, encoded_image_string=png)
        value = Summary.Value(tag=f"evaluation/{name}", image=image)
        self._append(self._events, _event(step, summary=Summary(value=[value])))

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        self._add_scalars(step, {f"rank {name}/{rank:03}_{host}": value for name, value in values.items()})

    def go_back(self, step: int) -> None:
        self._append(self._metrics, b"")
        _drop_records_after(self._metrics.path, step)
        self._append(self._events, _session_start(step + 1))

    def _record(self, kind: str, step: int, values: Values) -> None:
        self._append(self._metrics, f"{json.dumps({'step': step, **values})}\n".encode())
        self._add_scalars(step, {f"{kind}/{name}": value for name, value in values.items()})

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        events = (_scalar(step, name, value) for name, value in values.items())
        self._append(self._events, b"".join(events))

    def _append(self, file: AppendedFile, content: bytes) -> None:
        try:
            file.append(content)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._print(f"warning: {file.path} cannot be written: {error.strerror}. Training goes on.")
            return
        if self._failed and not any(each.lacks for each in (self._metrics, self._log, self._events)):
            self._failed = False
            self._print(f"The files in {self._folder} can be written again, and lack nothing.")

    def _print(self, text: str) -> None:
        self._progress.end_line()
        print(escape_controls(text), flush=True)

    def close(self) -> None:
        self._progress.end_line()
        for file in (self._metrics, self._log, self._events):
            self._append(file, b"")
            if file.lacks:
                self._print(f"warning: {file.path} lacks its last {file.lacks} bytes")


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


def _event_file(folder: Path) -> Path:
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    return folder / "tensorboard" / name


def _first_events(first_step: int) -> bytes:
    """Return the first events of a file: its version, and the step from which on earlier files are void."""
    return _event(0, file_version="brain.Event:2") + _session_start(first_step)


def _session_start(first_step: int) -> bytes:
    """Return the event after which TensorBoard ignores earlier ones from a step on."""
    return _event(first_step, session_log=SessionLog(status=SessionLog.START))


def _scalar(step: int, name: str, value: float) -> bytes:
    return _event(step, summary=scalar(name, value))  # type: ignore[no-untyped-call]


def _event(step: int, **content: Any) -> bytes:
    """Return an event of TensorBoard as a record of its file."""
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return record.getvalue()


def _drop_records_after(path: Path, step: int) -> None:
    """Remove the records of steps later than `step`, which will be trained again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    with atomic_write(path) as file:
        file.write(b"".join(line + b"\n" for line in lines if _step_of(line) <= step))


def _step_of(line: bytes) -> float:
    try:
        record: Any = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was written in part, or damaged
