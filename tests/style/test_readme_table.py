"""The tables of results are generated from the recorded results, and one command measures them again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from horovod_volo.bench.results import headline_table, markdown, read_records

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["README.md", "docs/results.md"])
def test_the_tables_are_generated_from_the_results(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- results -->\n(.*?)\n?<!-- /results -->", text, flags=re.DOTALL)
    assert len(blocks) == 1, f"{file} has no <!-- results --> ... <!-- /results --> block, or several"
    flag, table = (" --headlines", headline_table) if file == "README.md" else ("", markdown)
    assert blocks[0].strip() == table(read_records()), (
        f"Replace the text between the markers with the output of: python -m horovod_volo.bench table{flag}"
    )


def test_tools_bench_measures_every_recorded_result() -> None:
    shown = subprocess.run(
        [ROOT / "tools" / "bench", "--plan"], capture_output=True, text=True, check=True, timeout=20
    )
    newest = {record["name"]: record for record in read_records()}.values()
    recorded = {record["command"] for record in newest if record["hardware"]["gpu"] == "none"}
    assert recorded == set(shown.stdout.splitlines())
