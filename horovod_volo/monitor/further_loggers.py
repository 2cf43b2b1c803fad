"""Loggers beside TensorBoard: CSV tables, and services that are written to from threads of their own.

A service may be slow or fail: the loop never waits for it, and one warning is all that a failure costs.
Invariant: a service is sent each step once. After a resume, steps that it has are not sent again.
"""

from __future__ import annotations

import csv
import io
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.monitor.event_records import HparamValue
from horovod_volo.monitor.metrics_file import METRICS, is_of_training, read_metrics
from horovod_volo.monitor.progress import Values
from horovod_volo.monitor.services import CONNECTIONS, Connect
from horovod_volo.monitor.tags import EVALUATION, TRAIN

STATE = "loggers.json"  # in the run folder: the runs of services, and what they have
_CLOSE_SECONDS = 60.0


class RecordLogger(Protocol):
    """A logger that is given the same metrics as metrics.jsonl, which has them already."""

    _problem: str = ""

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        """Begin the run of this name."""

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write the metrics of training or of an evaluation."""

    def go_back(self) -> None:
        """Forget what metrics.jsonl has no longer."""

    def take_problem(self) -> str:
        """Return, once, what prevents writing."""
        problem, self._problem = self._problem, ""
        return problem

    def close(self, *, finished: bool) -> None:
        """Write what is left."""


def build_loggers(names: Sequence[str], folder: Path) -> list[RecordLogger]:
    """Build the loggers of --log-to."""
    return [
        CsvLogger(folder) if name == "csv" else ServiceLogger(name, folder, CONNECTIONS[name])
        for name in names
    ]


def check_packages(names: Sequence[str]) -> None:
    """Raise UserError if the package of a logger is missing."""
    for name in names:
        if name in CONNECTIONS and find_spec(name) is None:
            raise UserError(
                f"--log-to {name} needs the package {name}. Install it with "
                f"pip install 'horovod_volo[{name}]', or drop --log-to {name}."
            )


class CsvLogger(RecordLogger):
    """Two tables, train.csv and evaluation.csv, with a column for each metric.

    A table is written again where a new metric adds a column, and where records are dropped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, list[str]] = {}
        self._is_behind = {TRAIN: True, EVALUATION: True}

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:  # noqa: ARG002
        self.go_back()

    def write(self, kind: str, step: int, values: Values) -> None:
        row = {"step": step, **values}
        if self._is_behind[kind] or not row.keys() <= set(self._columns.get(kind, ())):
            self._rewrite(kind)
            return
        with self._noting_failure(kind), self._path(kind).open("a", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns[kind], lineterminator="\n").writerow(row)

    def go_back(self) -> None:
        for kind in (TRAIN, EVALUATION):
            self._rewrite(kind)

    def close(self, *, finished: bool) -> None:  # noqa: ARG002
        for kind, is_behind in self._is_behind.items():
            if is_behind:
                self._rewrite(kind)

    def _rewrite(self, kind: str) -> None:
        records = [
            record
            for record in read_metrics(self._folder / METRICS)
            if is_of_training(record) == (kind == TRAIN)
        ]
        self._columns[kind] = list(dict.fromkeys(name for record in records for name in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns[kind], lineterminator="\n")
        if records:
            writer.writeheader()
            writer.writerows(records)
        with self._noting_failure(kind):
            if records or self._path(kind).exists():
                with atomic_write(self._path(kind)) as file:
                    file.write(text.getvalue().encode())

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}.csv"

    @contextmanager
    def _noting_failure(self, kind: str) -> Iterator[None]:
        try:
            yield
            self._is_behind[kind] = False
        except OSError as error:
            if not any(self._is_behind.values()):
                self._problem = f"{self._path(kind)} cannot be written: {error.strerror}"
            self._is_behind[kind] = True  # it is written again as a whole


class ServiceLogger(RecordLogger):
    """Sends metrics to a service from a thread; after an error it says so, and sends no more."""

    def __init__(self, name: str, folder: Path, connect: Connect) -> None:
        self._name, self._folder, self._connect = name, folder, connect
        # kind, step, values and time of day of each record; None: there are no more
        self._queue: queue.SimpleQueue[tuple[str, int, Values, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finished = False

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(name, hparams), name=f"log to {self._name}", daemon=True
        )
        self._thread.start()

    def write(self, kind: str, step: int, values: Values) -> None:
        self._queue.put((kind, step, dict(values), time.time()))

    def go_back(self) -> None:
        pass  # steps that are trained again are not sent again

    def close(self, *, finished: bool) -> None:
        if self._thread is None:
            return
        self._finished = finished
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._problem = f"{self._name} has not taken all metrics within {_CLOSE_SECONDS:.0f} s"

    def _run(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        try:
            self._send_all(name, hparams)
        # Whatever a service's library raises, training goes on.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            self._problem = f"{self._name} is sent no more metrics: {reason}"

    def _send_all(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        sent = _states(self._folder).get(self._name, {})
        connection = self._connect(self._folder, name, hparams, str(sent.get("id", "")))
        sent["id"] = connection.id
        self._write_state(sent)
        while (record := self._queue.get()) is not None:
            kind, step, values, seconds = record
            if step > sent.get(kind, -1):
                connection.send(step, {f"{kind}/{key}": value for key, value in values.items()}, seconds)
                sent[kind] = step
                self._write_state(sent)
        connection.close(finished=self._finished)

    def _write_state(self, sent: Mapping[str, Any]) -> None:
        with _STATE_LOCK:
            states = _states(self._folder) | {self._name: sent}
            with atomic_write(self._folder / STATE) as file:
                file.write(json.dumps(states, indent=2).encode())


_STATE_LOCK = threading.Lock()  # the services of a run share a file


def _states(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        states: dict[str, dict[str, Any]] = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return states
