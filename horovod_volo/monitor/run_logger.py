"""Loggers of a run: log.txt, metrics.jsonl (one JSON object per line), TensorBoard and the terminal.

Invariant: after a resume, no record later than the resumed step remains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.monitor.progress import TrainingProgress, Values


class Logger(Protocol):
    """What the engine logs to: a `RunLogger` on rank 0, a `NullLogger` on all other ranks."""

    def log(self, text: str) -> None:
        """Print text and append it to log.txt."""

    def write_file(self, name: str, content: str) -> None:
        """Write a file into the run folder."""

    def log_training(self, step: int, values: Values) -> None:
        """Log the training metrics of a log point."""

    def log_evaluation(self, step: int, values: Values) -> None:
        """Log the metrics of an evaluation."""

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        """Log times of one rank to TensorBoard alone."""

    def close(self) -> None:
        """Flush and close files."""


class NullLogger:
    """Logger of the ranks that write nothing."""

    def log(self, text: str) -> None:
        pass

    def write_file(self, name: str, content: str) -> None:
        pass

    def log_training(self, step: int, values: Values) -> None:
        pass

    def log_evaluation(self, step: int, values: Values) -> None:
        pass

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class RunLogger:
    """Logger of rank 0: appends to the files of a run folder after `first_step`.

    `live` rewrites the progress line in place on a terminal.
    """

    def __init__(self, folder: Path, *, first_step: int, total_steps: int, live: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._metrics_path = folder / "metrics.jsonl"
        _drop_records_after(self._metrics_path, first_step)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._log = (folder / "log.txt").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
        self._progress = TrainingProgress(first_step=first_step, total_steps=total_steps, live=live)

    def log(self, text: str) -> None:
        self._progress.end_line()
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def write_file(self, name: str, content: str) -> None:
        with atomic_write(self._folder / name) as file:
            file.write(content.encode())

    def log_training(self, step: int, values: Values) -> None:
        self._record("train", step, values)
        line = self._progress.format(step, values)
        self._progress.show(line)
        print(line, file=self._log, flush=True)

    def log_evaluation(self, step: int, values: Values) -> None:
        self._record("evaluation", step, values)

    def log_rank(self, step: int, rank: int, host: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._tensorboard.add_scalar(f"rank {name}/{rank:03}_{host}", value, step)

    def _record(self, kind: str, step: int, values: Values) -> None:
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        self._progress.end_line()
        self._tensorboard.close()
        self._metrics.close()
        self._log.close()


def _drop_records_after(path: Path, step: int) -> None:
    """Remove the records of steps later than `step`, which will be trained again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in lines if _step_of(line) <= step).encode())


def _step_of(line: str) -> float:
    try:
        record: Any = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a killed process wrote in part
