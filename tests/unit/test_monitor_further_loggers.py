"""CSV tables, Weights & Biases and MLflow get the metrics once, over a resume, and never stop a run."""

from __future__ import annotations

import csv
import json
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.schema import Logging
from horovod_volo.config.validation import loggers
from horovod_volo.core.errors import UserError
from horovod_volo.monitor import further_loggers
from horovod_volo.monitor.further_loggers import STATE, ServiceLogger, WandbLogger
from horovod_volo.monitor.logger import FURTHER_LOGGERS, HparamValue, RunDescription, check_packages
from horovod_volo.monitor.progress import RunLength
from horovod_volo.monitor.run_logger import RunLogger

POINT: dict[str, float | int] = {"loss": 2.5, "lr": 1e-3, "images_per_second": 100.0, "data_wait": 0.25}


def open_logger(folder: Path, log_to: str, first_step: int = 0) -> RunLogger:
    logger = RunLogger(folder, RunLength(first_step, 10, 10, 1), settings=Logging(log_to=log_to))
    logger.describe(first_step, lambda: RunDescription({}, {"model": "volo_demo", "lr": 0.1}, ["top1"]))
    return logger


def log(logger: RunLogger, *steps: int, **more: float) -> None:
    for step in steps:
        logger.log_training(step, POINT | more)


def interrupted_and_resumed(folder: Path, log_to: str) -> None:
    """Log steps 1 to 4, with an evaluation at 2; go on after step 2 up to 5, and finish."""
    first = open_logger(folder, log_to)
    log(first, 1, 2)
    first.log_evaluation(2, {"top1": 12.5})
    log(first, 3, 4)
    first.close()
    second = open_logger(folder, log_to, first_step=2)
    log(second, 3, 4, 5)
    second.log_evaluation(5, {"top1": 25.0})
    second.finish(5)
    second.close()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_metrics_of_the_run(tmp_path: Path) -> None:
    interrupted_and_resumed(tmp_path, "csv")
    found = rows(tmp_path / "train.csv")
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5"]
    assert list(found[0]) == ["step", *POINT]
    assert float(found[0]["loss"]) == 2.5
    assert rows(tmp_path / "evaluation.csv") == [
        {"step": "2", "top1": "12.5"},
        {"step": "5", "top1": "25.0"},
    ]


def test_csv_is_written_every_minute_with_a_column_for_a_metric_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logger = open_logger(tmp_path, "csv")
    log(logger, 1)
    assert not (tmp_path / "train.csv").exists()
    now[0] += 61
    (tmp_path / "train.csv").mkdir()  # cannot be written
    log(logger, 2, gradient_norm=3.0)
    (tmp_path / "train.csv").rmdir()
    now[0] += 61
    log(logger, 3)
    norms = [(row["step"], row["gradient_norm"]) for row in rows(tmp_path / "train.csv")]
    assert norms == [("1", ""), ("2", "3.0"), ("3", "")]
    logger.go_back(2)
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == ["1", "2"]
    assert capsys.readouterr().out.count("--log-to csv cannot write") == 1


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run's file: a header, then LevelDB's log format."""
    content, place, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place < len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    interrupted_and_resumed(tmp_path, "wandb")
    files = sorted(tmp_path.rglob("run-*.wandb"))
    assert (len(files), len({file.name for file in files})) == (2, 1), "one run, in two parts"

    def rows_of_history() -> list[dict[str, float]]:
        found = []
        for content in (content for file in files for content in wandb_records(file)):
            record = Record()
            record.ParseFromString(content)
            items = record.history.item
            found.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
        return [row for row in found if "train/loss" in row]

    limit = time.monotonic() + 20
    while len(found := rows_of_history()) < 5 and time.monotonic() < limit:
        time.sleep(0.1)  # its service writes the end of the file after the run is finished
    assert [(row["_step"], row["train/loss"]) for row in found] == [(step, 2.5) for step in range(1, 6)]
    assert found[-1]["evaluation/top1"] == 25.0


def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    interrupted_and_resumed(run, "mlflow")
    client = mlflow.MlflowClient()
    number = json.loads((run / STATE).read_text())["mlflow"]["id"]
    found = client.get_run(number)
    assert (found.info.status, found.data.params["model"]) == ("FINISHED", "volo_demo")
    history = client.get_metric_history(number, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, 2.5) for step in range(1, 6)]
    assert found.data.metrics["evaluation/top1"] == 25.0


class BrokenService(ServiceLogger):
    """A service that takes a while, and then no more."""

    package = "wandb"

    def connect(self, name: str, hparams: Mapping[str, HparamValue], run_id: str) -> str:
        return "7"

    def send(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        time.sleep(0.2)
        if step == 2:
            raise ConnectionError("the server is gone\nand more")

    def disconnect(self, *, finished: bool) -> None:
        raise AssertionError("it is not reached")


def test_a_service_that_fails_costs_one_warning_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FURTHER_LOGGERS, "wandb", BrokenService)
    logger = open_logger(tmp_path, "wandb")
    began = time.monotonic()
    log(logger, 1, 2, 3)
    assert time.monotonic() - began < 0.2
    time.sleep(0.6)
    log(logger, 4, 5)
    logger.close()
    shown = capsys.readouterr().out
    assert shown.count("wandb is sent no more metrics: the server is gone. Training goes on.") == 1
    assert "and more" not in shown
    assert json.loads((tmp_path / STATE).read_text())["wandb"] == {"id": "7", "train": 1}


def test_a_service_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(further_loggers, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(WandbLogger, "connect", lambda *_: time.sleep(1))
    logger = WandbLogger(tmp_path)
    logger.begin("run", {})
    began = time.monotonic()
    logger.close(finished=True)
    assert time.monotonic() - began < 0.5
    assert "wandb has not taken all" in logger.problem


def test_names_of_loggers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = parse(["data", "--log-to", "csv", "--log-to", "wandb", "--log-to", "csv"]).config.logging
    assert loggers(chosen) == ("csv", "wandb")
    with pytest.raises(UserError, match=r"--log-to .* wandb.*'wandbb'"):
        parse(["data", "--log-to", "wandbb"])
    monkeypatch.setattr("horovod_volo.monitor.logger.find_spec", lambda _: None)
    check_packages(["csv"])
    with pytest.raises(UserError, match=r"pip install 'horovod_volo\[mlflow"):
        check_packages(["mlflow"])
