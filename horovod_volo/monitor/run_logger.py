"""What a run leaves to look at: log.txt, metrics.jsonl, TensorBoard events, and lines on the terminal.

One line of metrics.jsonl is one object. After a resume, nothing later than the resumed step remains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.monitor.progress import Progress

Values = dict[str, float | int]


class Logger(Protocol):
    """What the engine tells, whether anybody listens or not."""

    def log(self, text: str) -> None:
        """Print text and keep it in log.txt."""

    def write_file(self, name: str, content: str) -> None:
        """Keep a file in the run folder."""

    def log_training(self, step: int, values: Values) -> None:
        """Record a log point of training."""

    def log_evaluation(self, step: int, values: Values) -> None:
        """Record an evaluation."""

    def close(self) -> None:
        """Flush and close files."""


class NullLogger:
    """Every rank but the first."""

    def log(self, text: str) -> None:
        pass

    def write_file(self, name: str, content: str) -> None:
        pass

    def log_training(self, step: int, values: Values) -> None:
        pass

    def log_evaluation(self, step: int, values: Values) -> None:
        pass

    def close(self) -> None:
        pass


class RunLogger:
    """Writes into a run folder, from `first_step` on; `live` lets the progress line move in place."""

    def __init__(self, folder: Path, *, first_step: int, total_steps: int, live: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._metrics_path = folder / "metrics.jsonl"
        _forget_after(self._metrics_path, first_step)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._log = (folder / "log.txt").open("a", encoding="utf-8")
        self._board = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
        self._progress = Progress(first_step=first_step, total_steps=total_steps, live=live)

    def log(self, text: str) -> None:
        self._progress.clear()
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def write_file(self, name: str, content: str) -> None:
        with atomic_write(self._folder / name) as file:
            file.write(content.encode())

    def log_training(self, step: int, values: Values) -> None:
        self._record("train", step, values)
        line = self._progress.line(step, values)
        self._progress.show(line)
        print(line, file=self._log, flush=True)

    def log_evaluation(self, step: int, values: Values) -> None:
        self._record("evaluation", step, values)

    def _record(self, kind: str, step: int, values: Values) -> None:
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)
        self._board.flush()

    def close(self) -> None:
        self._progress.clear()
        self._board.close()
        self._metrics.close()
        self._log.close()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines later than `step`: they are of a future that is being run again."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        record: Any = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a killed writer
