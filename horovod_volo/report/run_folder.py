"""Reads a run folder: settings, environment, metrics, starts, confusions, and whether the run has ended.

Settings are not checked against those of this version, so that runs of other versions have a page too.
"""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from horovod_volo.core.errors import UserError
from horovod_volo.engine.accuracy import CONFUSIONS
from horovod_volo.models.pretrained import SETTINGS_OF_RUN
from horovod_volo.monitor.logger import METRICS, TRAIN, MetricsRecord, kind_of, read_metrics

Record = dict[str, float]  # finite numbers by name

_LEDGER = "ledger.jsonl"  # of the extra `elastic`: the hosts of each start


@dataclass(frozen=True)
class RunFolder:
    """The content of a run folder."""

    name: str  # unique among the runs of a page
    recipe: str  # the text of its settings
    settings: dict[str, Any]  # by "table.name"
    environment: dict[str, Any]
    hosts: list[str]  # of each rank
    banner: dict[str, str]  # the properties that the log begins with; none for runs of earlier versions
    training: list[Record]
    evaluations: list[Record]
    confusions: dict[str, Any]  # empty: none
    starts: list[dict[str, Any]]  # of the ledger: one for each resume and re-forming
    last_line: str  # of the log

    def hosts_at(self, step: float) -> list[str]:
        """Return the host of each rank at a step; an elastic run changes them."""
        earlier = [start["hosts"] for start in self.starts if start["step"] < step]
        hosts: list[str] = [self.hosts, *earlier][-1]
        return hosts


def read_runs(folders: Sequence[str]) -> list[RunFolder]:
    """Read runs; raise UserError for the first that cannot be read."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("a run is named twice. Name each run once.")
    # The names are the shortest ends of the paths that differ.
    ends = (["/".join(path.parts[-parts:]) for path in paths] for parts in count(1))
    names = next(names for names in ends if len(set(names)) == len(names))
    return [_read_run(Path(folder), name) for folder, name in zip(folders, names, strict=True)]


def _read_run(folder: Path, name: str) -> RunFolder:
    """Read a run folder; raise UserError if it is none, is empty, or a file is damaged as a whole."""
    for part in (folder, folder / METRICS, folder / SETTINGS_OF_RUN):
        if not part.exists():
            raise UserError(f"there is no {part}. Name the folder of a run, as runs/NAME.")
    try:
        records = [(kind_of(record) == TRAIN, _numbers(record)) for record in read_metrics(folder / METRICS)]
        recipe, log = (_read_text(folder / file) for file in (SETTINGS_OF_RUN, "log.txt"))
        environment = _read_json(folder / "environment.json")
        run = RunFolder(
            name=name,
            recipe=recipe,
            settings=_flattened(tomllib.loads(recipe)),
            environment=environment,
            hosts=environment.get("hosts", []),
            banner=environment.get("banner", {}),
            training=[record for trains, record in records if trains],
            evaluations=[record for trains, record in records if not trains],
            confusions=_read_json(folder / CONFUSIONS),
            starts=[line for line in read_metrics(folder / _LEDGER) if "hosts" in line],
            last_line=log.rstrip("\n").rpartition("\n")[2],
        )
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{folder / SETTINGS_OF_RUN} is damaged: {error}. Restore it.") from None
    if not records:
        raise UserError(
            f"{folder / METRICS} has no record. Wait for the first log point, or name another run."
        )
    return run


def _numbers(record: MetricsRecord) -> Record:
    return {
        key: value for key, value in record.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _flattened(tables: dict[str, Any]) -> dict[str, Any]:
    tables = {table: values for table, values in tables.items() if isinstance(values, dict)}
    return {f"{table}.{name}": value for table, values in tables.items() for name, value in values.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(_read_text(path) or "{}")
    except ValueError:
        raise UserError(f"{path} is damaged: it is no JSON. Remove it, or restore it.") from None
    return content


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
