"""The table of results is generated from the recorded results, and one command measures them again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from horovod_volo.bench.results import markdown, read_records

ROOT = Path(__file__).parents[2]


def test_the_table_is_generated_from_the_results() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- results -->\n(.*?)\n?<!-- /results -->", text, flags=re.DOTALL)
    assert block.strip() == markdown(read_records()), (
        "Replace the text between the markers with the output of: python -m horovod_volo.bench table"
    )


def test_tools_bench_measures_every_recorded_result() -> None:
    shown = subprocess.run(
        [ROOT / "tools" / "bench", "--plan"], capture_output=True, text=True, check=True, timeout=20
    )
    newest = {record["name"]: record for record in read_records()}.values()
    recorded = {record["command"] for record in newest if record["hardware"]["gpu"] == "none"}
    assert recorded == set(shown.stdout.splitlines())
