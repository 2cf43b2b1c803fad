"""Weights & Biases and MLflow, by their own libraries, which are imported when a run logs to them.

What they need to know of their servers is set where their libraries look for it, as in WANDB_MODE and
MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from horovod_volo.monitor.event_records import HparamValue

_PROJECT = "horovod_volo"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another
_LOGIN_SECONDS = 20


class ServiceRun(Protocol):
    """A run of a service."""

    id: str

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Send metrics, which are of this time of day."""

    def close(self, *, finished: bool) -> None:
        """Send what is left; a run that is not finished may be resumed."""


# (run folder, name, hyperparameters, id of the run to resume or "") -> its run
Connect = Callable[[Path, str, Mapping[str, HparamValue], str], ServiceRun]


class WandbRun:
    """A run of Weights & Biases, whose steps are those of training: they never decrease."""

    def __init__(self, folder: Path, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=run_id or None,
            resume="allow",
            dir=str(folder),
            config=dict(hparams),
            settings=wandb.Settings(console="off", silent=True, login_timeout=_LOGIN_SECONDS),
        )
        self.id = str(self._run.id)

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:  # noqa: ARG002
        self._run.log(dict(values), step=step)

    def close(self, *, finished: bool) -> None:  # noqa: ARG002
        self._run.finish()


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, folder: Path, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> None:  # noqa: ARG002
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            self.id = run_id
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self.id = str(self._client.create_run(number, run_name=name).info.run_id)
        self._client.log_batch(self.id, params=[Param(key, str(value)) for key, value in hparams.items()])

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        time_stamp = round(1000 * seconds)
        metrics: list[Any] = [self._metric(key, value, time_stamp, step) for key, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


CONNECTIONS: Mapping[str, Connect] = {"wandb": WandbRun, "mlflow": MlflowRun}
