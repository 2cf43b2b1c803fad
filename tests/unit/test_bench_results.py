"""Results are kept with what produced them, and the table shows the newest of each name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.bench.results import (
    Figure,
    Result,
    append,
    lines,
    markdown,
    read_records,
    record_of,
)
from horovod_volo.core.errors import UserError

RESULT = Result(
    "step volo_d1",
    "training step",
    [Figure("whole step", 1234.5, "ms", 12.34, 2000.0), Figure("memory", 0.5, "x")],
)


def record(name: str = "step volo_d1", commit: str = "abc") -> dict[str, Any]:
    made = record_of(RESULT, "python -m horovod_volo.bench step", load=(0.123, 2.0))
    where = {"cpu": "Some CPU", "cores": 2, "threads": 1, "gpu": "none"}
    return made | {"name": name, "commit": commit, "date": "2026-01-02", "hardware": where}


def test_a_record_has_what_produced_it() -> None:
    made = record_of(RESULT, "command", load=(0.123, 2.0))
    assert list(made) == ["name", "title", "date", "commit", "hardware", "load", "command", "figures"]
    assert made["load"] == [0.12, 2.0]
    assert made["hardware"]["cores"] > 0
    assert made["hardware"]["cpu"]
    assert len(made["date"].split("-")) == 3
    assert json.loads(json.dumps(made)) == made


def test_records_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_records(path) == []
    append(record(commit="old"), path)
    append(record(commit="new"), path)
    assert [found["commit"] for found in read_records(path)] == ["old", "new"]
    assert read_records(path)[1] == record(commit="new")
    with pytest.raises(UserError, match="Record from a checkout"):
        append(record(), tmp_path / "nowhere" / "results.jsonl")


def test_the_table_shows_the_newest_of_each_name() -> None:
    table = markdown([record("step"), record("loss"), record("step", commit="newer")])
    assert table.splitlines() == [
        "| Measured | Value | On | With | At |",
        "| --- | --- | --- | --- | --- |",
        "| **loss**: training step |  | Some CPU, cores: 2, compute threads a rank: 1 "
        "| `python -m horovod_volo.bench step` | abc, 2026-01-02 |",
        "| whole step | 1,234 ms (12.3 to 2,000) |  |  |  |",
        "| memory | 0.50 x |  |  |  |",
        "| **step**: training step |  | Some CPU, cores: 2, compute threads a rank: 1 "
        "| `python -m horovod_volo.bench step` | newer, 2026-01-02 |",
        "| whole step | 1,234 ms (12.3 to 2,000) |  |  |  |",
        "| memory | 0.50 x |  |  |  |",
    ]


def test_lines_for_people() -> None:
    assert lines(record()).splitlines() == [
        "step volo_d1: training step",
        "  whole step  1,234 ms (12.3 to 2,000)",
        "  memory      0.50 x",
        "  on Some CPU, cores: 2, compute threads a rank: 1; load 0.12 to 2.0",
    ]
