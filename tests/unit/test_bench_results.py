"""Results are kept with what produced them, and the table shows the newest of each name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.bench.results import Figure, Result, append, lines, markdown, read_records, record_of
from horovod_volo.core.errors import UserError

FIGURES = [Figure("whole step", 1234.5, "ms", 12.34, 2000.0), Figure("memory", 0.5, "x")]


def record(name: str = "step volo_d1", commit: str = "abc") -> dict[str, Any]:
    result = Result(name, "training step", FIGURES)
    return record_of(result, "python -m horovod_volo.bench step", load=(0.123, 2.0)) | {"commit": commit}


def test_records_are_appended_with_what_produced_them(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_records(path) == []
    for commit in ("old", "new"):
        append(record(commit=commit), path)
    assert read_records(path) == [record(commit="old"), record(commit="new")]
    made = read_records(path)[0]
    assert list(made) == ["name", "title", "date", "commit", "hardware", "load", "command", "figures"]
    assert made["load"] == [0.12, 2.0]
    assert made["hardware"]["cores"] > 0
    assert json.loads(json.dumps(made)) == made
    with pytest.raises(UserError, match="Record from a checkout"):
        append(record(), tmp_path / "nowhere" / "results.jsonl")


def test_the_table_shows_the_newest_of_each_name() -> None:
    rows = markdown([record("step"), record("loss"), record("step", commit="newer")]).splitlines()
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in table[2::3]] == ["**loss**: training step", "**step**: training step"]
    assert [row[4].split(",")[0] for row in table[2::3]] == ["abc", "newer"]
    figures = [["whole step", "1,234 ms (12.3 to 2,000)"], ["memory", "0.50 x"]]
    assert [row[:2] for row in table[3:5]] == [row[:2] for row in table[6:8]] == figures
    assert "  memory      0.50 x" in lines(record()).splitlines()
