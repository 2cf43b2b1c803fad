"""The logger of rank 0: log.txt, metrics.jsonl, TensorBoard and the terminal.

Invariant: nothing is lost because a disk was full for a time.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from horovod_volo.core.atomic_file import MayWrite, atomic_write
from horovod_volo.core.errors import UserError, escape_controls, show
from horovod_volo.monitor import charts
from horovod_volo.monitor.charts import OTHER_AXES, Board, all_other_axes, description_events
from horovod_volo.monitor.logger import (
    EVALUATION,
    METRICS,
    TRAIN,
    AppendedFile,
    Logger,
    Picture,
    RunDescription,
    Values,
    drop_records_after,
)
from horovod_volo.monitor.progress import RunLength, TrainingProgress


class RunLogger(Logger):
    """Logger of rank 0: appends to the files of a run folder after the first step of `length`.

    `live` rewrites the progress line in place on a terminal; `may_write` raises UserError if this process
    must not write. A file that cannot be written, because the disk is full or the folder is gone, does not
    end the run: what it lacks is kept, and written when that is possible.
    """

    def __init__(
        self, folder: Path, length: RunLength, *, live: bool = True, may_write: MayWrite = lambda: None
    ) -> None:
        """Open the files; raise OSError if that is not possible."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._may_write = folder, may_write
        earlier = drop_records_after(folder / METRICS, length.first_step, may_write)
        self._board = Board(earlier)
        self._metrics = AppendedFile(folder / METRICS, may_write=may_write)
        self._log = AppendedFile(folder / "log.txt", may_write=may_write)
        self._log.renew()
        start, axes = charts.file_start(length.first_step + 1), all_other_axes(earlier)
        self._events = AppendedFile(_event_file(folder), start, may_write)
        self._other_axes = AppendedFile(_event_file(folder / OTHER_AXES), axes, may_write)
        self._files = (self._metrics, self._log, self._events, self._other_axes)
        self._failed = False  # whether the last write did
        for file in self._files:
            if file is not self._other_axes or file.path.parent.exists():
                file.append(b"")
        self._progress = TrainingProgress(length, live=live)

    def log(self, *lines: str) -> None:
        for line in lines:
            self._print(line)
        self._append(self._log, "".join(f"{escape_controls(line)}\n" for line in lines).encode())

    def write_file(self, name: str, content: str) -> None:
        self._may_write()
        try:
            with atomic_write(self._folder / name, self._may_write) as file:
                file.write(content.encode())
        except OSError as error:
            self._print(f"warning: {self._folder / name} is not written: {error.strerror}")

    def step_done(self, step: int) -> None:
        if message := self._progress.step_done(step):
            self.log(message)

    def evaluating(self, done: int, total: int) -> None:
        self._progress.evaluating(done, total)

    def log_training(self, step: int, values: Values) -> None:
        self._record(TRAIN, step, values)
        line = self._progress.format(step, values)
        self._progress.show(line)
        self._append(self._log, f"{line}\n".encode())

    def log_evaluation(self, step: int, values: Values) -> None:
        self._record(EVALUATION, step, values)
        self._append(self._other_axes, self._board.other_axes(values))

    def log_ranks(self, step: int, values: Mapping[str, float]) -> None:
        self._append(self._events, charts.scalars(step, values))

    def log_pictures(self, step: int, group: str, draw: Callable[[], Mapping[str, Picture]]) -> None:
        for name, picture in draw().items():
            self._append(self._events, charts.picture(step, f"{group}/{name}", picture))

    def describe(self, step: int, describe: Callable[[], RunDescription]) -> None:
        self._append(self._events, description_events(step, describe()))

    def finish(self, step: int) -> None:
        self._append(self._events, charts.session_end(step))

    def go_back(self, step: int) -> None:
        self._append(self._metrics, b"")
        earlier = drop_records_after(self._metrics.path, step, self._may_write)
        self._board = Board(earlier)
        self._append(self._events, charts.session_start(step + 1))
        if self._other_axes.path.exists():
            self._append(self._other_axes, all_other_axes(earlier))

    def close(self) -> None:
        self._progress.end_line()
        with suppress(UserError):  # another process has taken over the folder: the rest is not written
            for file in self._files:
                if file is not self._other_axes or file.lacks:
                    self._append(file, b"")
                if file.lacks:
                    self._print(f"warning: {file.path} lacks its last {file.lacks} bytes")

    def _record(self, kind: str, step: int, values: Values) -> None:
        self._append(self._metrics, f"{json.dumps({'step': step, **values})}\n".encode())
        self._append(self._events, self._board.scalars(kind, step, values))

    def _append(self, file: AppendedFile, content: bytes) -> None:
        try:
            file.append(content)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._print(f"warning: {file.path} cannot be written: {error.strerror}. Training goes on.")
            return
        if self._failed and not any(each.lacks for each in self._files):
            self._failed = False
            self._print(f"The files in {self._folder} can be written again, and lack nothing.")

    def _print(self, text: str) -> None:
        self._progress.end_line()
        show(escape_controls(text))


def _event_file(folder: Path) -> Path:
    return folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
