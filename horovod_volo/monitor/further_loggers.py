"""Loggers beside TensorBoard: CSV tables, and Weights & Biases and MLflow, each sent to from a thread.

A service may be slow or fail: the loop never waits for it, and one warning is all that a failure costs. Its
server is set where its library looks for it, as in WANDB_MODE and MLFLOW_TRACKING_URI.
Invariant: a service is sent each step once. After a resume, steps that it has are not sent again.
"""

from __future__ import annotations

import csv
import io
import json
import os
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.monitor.logger import (
    EVALUATION,
    FURTHER_LOGGERS,
    METRICS,
    TRAIN,
    FurtherLogger,
    HparamValue,
    MetricsRecord,
    Values,
    kind_of,
    read_metrics,
)

STATE = "loggers.json"  # in the run folder: the runs of services, and what they have
_PROJECT = "horovod_volo"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another
_SECONDS_BETWEEN_TABLES = _CLOSE_SECONDS = 60.0
_LOGIN_SECONDS = 20


class CsvLogger(FurtherLogger):
    """The records of metrics.jsonl as tables, train.csv and evaluation.csv, with a column for each metric.

    They are written as a whole: after an evaluation, at the end, and between them every minute.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._next_seconds = 0.0
        self._failed = False  # whether the last write did

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:  # noqa: ARG002
        self._write_tables()

    def write(self, kind: str, step: int, values: Values) -> None:  # noqa: ARG002
        if kind == EVALUATION or time.monotonic() >= self._next_seconds:
            self._write_tables()

    def go_back(self) -> None:
        self._write_tables()

    def close(self, *, finished: bool) -> None:  # noqa: ARG002
        self._write_tables()

    def _write_tables(self) -> None:
        self._next_seconds = time.monotonic() + _SECONDS_BETWEEN_TABLES
        records = read_metrics(self.folder / METRICS)
        try:
            for kind in (TRAIN, EVALUATION):
                _write_table(self.folder / f"{kind}.csv", [each for each in records if kind_of(each) == kind])
            self._failed = False
        except OSError as error:
            if not self._failed:
                self.problem = f"--log-to csv cannot write: {error.strerror}"
            self._failed = True


def _write_table(path: Path, records: Sequence[MetricsRecord]) -> None:
    if not records and not path.exists():
        return
    text = io.StringIO()
    columns = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


class ServiceLogger(FurtherLogger):
    """Sends metrics to a service from a thread; after an error it says so, and sends no more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # kind, step, values and time of day of each record; None: there are no more
        self._queue: queue.SimpleQueue[tuple[str, int, Values, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finished = False

    @abstractmethod
    def connect(self, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> str:
        """Begin a run of the service, or resume the one of this id; return its id."""

    @abstractmethod
    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Send metrics, which are of this time of day."""

    @abstractmethod
    def disconnect(self, *, finished: bool) -> None:
        """Send what is left; a run that is not finished may be resumed."""

    def begin(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        self._thread = threading.Thread(target=self._run, args=(name, hparams), daemon=True)
        self._thread.start()

    def write(self, kind: str, step: int, values: Values) -> None:
        self._queue.put((kind, step, dict(values), time.time()))

    def close(self, *, finished: bool) -> None:
        if self._thread is None:
            return
        self._finished = finished
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self.problem = f"{self.package} has not taken all metrics within {_CLOSE_SECONDS:.0f} s"

    def _run(self, name: str, hparams: Mapping[str, HparamValue]) -> None:
        try:
            sent = _states(self.folder).get(self.package, {})
            sent["id"] = self.connect(name, hparams, str(sent.get("id", "")))
            self._write_state(sent)
            while (record := self._queue.get()) is not None:
                kind, step, values, seconds = record
                if step > sent.get(kind, -1):
                    self.send(step, {f"{kind}/{key}": value for key, value in values.items()}, seconds)
                    sent[kind] = step
                    self._write_state(sent)
            self.disconnect(finished=self._finished)
        # Whatever a service's library raises, training goes on.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            self.problem = f"{self.package} is sent no more metrics: {reason}"

    def _write_state(self, sent: Mapping[str, Any]) -> None:
        with _STATE_LOCK:
            states = _states(self.folder) | {self.package: sent}
            with atomic_write(self.folder / STATE) as file:
                file.write(json.dumps(states, indent=2).encode())


_STATE_LOCK = threading.Lock()  # the services of a run share a file


def _states(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        states: dict[str, dict[str, Any]] = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return states


class WandbLogger(ServiceLogger):
    """A run of Weights & Biases, whose steps are those of training: they never decrease."""

    package = "wandb"

    def connect(self, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> str:
        import wandb

        self._wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=run_id or None,
            resume="allow",
            dir=str(self.folder),
            config=dict(hparams),
            settings=wandb.Settings(console="off", silent=True, login_timeout=_LOGIN_SECONDS),
        )
        return str(self._wandb_run.id)

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
        self._wandb_run.log(dict(values), step=step)

    def disconnect(self, *, finished: bool) -> None:  # noqa: ARG002
        self._wandb_run.finish()


class MlflowLogger(ServiceLogger):
    """A run of MLflow."""

    package = "mlflow"

    def connect(self, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric, self._id = MlflowClient(), Metric, run_id
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = str(self._client.create_run(number, run_name=name).info.run_id)
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in hparams.items()])
        return self._id

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        metrics = [self._metric(key, value, round(1000 * seconds), step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def disconnect(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


FURTHER_LOGGERS.register("csv", CsvLogger)
FURTHER_LOGGERS.register("wandb", WandbLogger)
FURTHER_LOGGERS.register("mlflow", MlflowLogger)
