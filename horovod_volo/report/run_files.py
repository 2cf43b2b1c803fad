"""Reads a run folder for its report: settings, environment, metrics, what the log says, confusions.

A line of metrics.jsonl that a killed process wrote in part is left out, and counted. A file without which
nothing can be said about the run, or that is damaged as a whole, raises UserError.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from horovod_volo.config.values import all_settings, checked
from horovod_volo.core.errors import UserError
from horovod_volo.elastic.ledger import LEDGER, read_ledger
from horovod_volo.engine.confusions import CONFUSIONS
from horovod_volo.models.pretrained import SETTINGS_OF_RUN

Record = dict[str, float]  # numbers by name; "step" is one of them

_OF_TRAINING = "images_per_second"  # is in every record of training, and in no evaluation
_BANNER = re.compile(r" {,9}([a-z]+)  (\S.*)")
_LENGTH = re.compile(r"epochs x ([\d,]+) steps")
_NEXT = "Name the folder of a run, as runs/NAME, which training writes."


@dataclass(frozen=True)
class RunStart:
    """A start of a run, of its ledger."""

    step: int  # that the run had reached
    hosts: list[str]  # of each rank
    steps_per_epoch: int


@dataclass(frozen=True)
class RunFiles:
    """What a run folder says."""

    folder: Path
    name: str  # unique among the runs of a page
    recipe: str  # the text of its settings
    settings: dict[str, dict[str, Any]]  # by table and name
    environment: dict[str, Any]
    training: list[Record]
    evaluations: list[Record]
    confusions: dict[str, Any]  # empty: none
    starts: list[RunStart]
    banner: dict[str, str]  # the properties that the log begins with, of the latest start
    last_line: str  # of the log
    damaged: int  # lines of metrics.jsonl

    @property
    def loss_parts(self) -> list[str]:
        """Return the names of the terms of the loss: the engine writes them between the loss and `lr`."""
        keys = list(self.training[-1]) if self.training else []
        return keys[keys.index("loss") + 1 : keys.index("lr")] if {"loss", "lr"} <= {*keys} else []

    @property
    def steps_per_epoch(self) -> float:
        """Return the steps of an epoch; 0: nothing says it."""
        if self.starts:
            return float(self.starts[0].steps_per_epoch)
        found = _LENGTH.search(self.banner.get("length", ""))
        return float(found[1].replace(",", "")) if found else 0.0

    @property
    def epochs(self) -> int:
        """Return the epochs of the whole run."""
        update = self.settings.get("update", {})
        added = ["epochs", "cooldown_epochs"]
        if update.get("warmup_prefix") and update.get("sched") != "one-cycle":  # which has no warm-up
            added.append("warmup_epochs")
        return sum(int(update.get(name, 0)) for name in added)

    @property
    def hosts(self) -> list[str]:
        """Return the host of each rank."""
        hosts = self.environment.get("hosts")
        return list(map(str, hosts)) if isinstance(hosts, list) else []

    def setting(self, table: str, name: str) -> Any:
        """Return a setting, or None."""
        return self.settings.get(table, {}).get(name)

    def hosts_at(self, step: float) -> list[str]:
        """Return the host of each rank at a step; an elastic run changes them."""
        return [self.hosts, *(start.hosts for start in self.starts if start.step < step)][-1]


def read_runs(folders: Sequence[str]) -> list[RunFiles]:
    """Read runs; raise UserError for the first that cannot be read."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("a run is named twice. Name each run once.")
    # The names are the shortest ends of the paths that differ.
    ends = (["/".join(path.parts[-parts:]) for path in paths] for parts in count(1))
    names = next(names for names in ends if len(set(names)) == len(names))
    return [read_run(Path(folder), name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> RunFiles:
    """Read a run folder; raise UserError if it is none, is empty, or its files are damaged."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}. {_NEXT}")
    records, damaged = _read_metrics(folder / "metrics.jsonl")
    recipe = _read_text(folder / SETTINGS_OF_RUN)
    log = _read_text(folder / "log.txt").splitlines()
    return RunFiles(
        folder=folder,
        name=name,
        recipe=recipe,
        settings=_parse_settings(recipe, folder / SETTINGS_OF_RUN),
        environment=_read_json(folder / "environment.json"),
        training=[record for record in records if _OF_TRAINING in record],
        evaluations=[record for record in records if _OF_TRAINING not in record],
        confusions=_read_json(folder / CONFUSIONS),
        starts=_read_starts(folder / LEDGER),
        banner={found[1]: found[2] for line in log if (found := _BANNER.fullmatch(line))},
        last_line=log[-1] if log else "",
        damaged=damaged,
    )


def _read_metrics(path: Path) -> tuple[list[Record], int]:
    """Return the records in the order of their steps, and how many lines are damaged."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}: it is no run folder, or not yet. {_NEXT}")
    lines = [_numbers_of(line) for line in _read_text(path).splitlines()]
    records = [record for record in lines if "step" in record]
    if not records:
        problem = "is damaged: it has no record" if lines else "is empty"
        raise UserError(f"{path} {problem}. Wait for the first log point of the run, or name another run.")
    # Of equal steps, the last was trained last.
    found = {(_OF_TRAINING in record, record["step"]): record for record in records}
    return sorted(found.values(), key=lambda record: record["step"]), len(lines) - len(records)


def _numbers_of(line: str) -> Record:
    """Return the finite numbers of a record; none, if the line is damaged."""
    try:
        record = json.loads(line)
        items = record.items() if isinstance(record, dict) else ()
        return {key: value for key, value in items if type(value) in (int, float) and math.isfinite(value)}
    except (ValueError, RecursionError, OverflowError):  # the last: a whole number beyond those of float
        return {}


def _read_starts(path: Path) -> list[RunStart]:
    """Return the starts of a run; lines of the ledger that are none, or damaged, are left out."""
    starts = []
    for line in read_ledger(path) if path.is_file() else []:
        match line:
            case {"step": int(step), "hosts": list(hosts), "steps_per_epoch": int(length)} if length > 0:
                starts.append(RunStart(step, list(map(str, hosts)), length))
    return starts


def _parse_settings(text: str, path: Path) -> dict[str, dict[str, Any]]:
    # Not by load_recipe: a run of another version, whose settings have other names, has a report too.
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}: it is no run folder, or not a whole one. {_NEXT}")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is damaged: {error}. Restore it, or name another run.") from None
    settings = {name: values for name, values in tables.items() if isinstance(values, dict)}
    for setting in all_settings():
        values = settings.get(setting.group, {})
        if setting.name in values:
            checked(setting, values[setting.name], f"{path}: {setting.group}.{setting.name}")
    return settings


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path)) if path.is_file() else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is no JSON object. Remove it, or restore it.")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Correct its permissions.") from None
