"""The README's table of results is what the recorded results make it, and one command measures it again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from horovod_volo.bench.results import read_records
from horovod_volo.bench.table import markdown

ROOT = Path(__file__).parents[2]


def test_the_table_is_made_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- results -->\n(.*?)\n?<!-- /results -->", readme, flags=re.DOTALL)
    assert len(blocks) == 1, "README.md has no <!-- results --> ... <!-- /results --> block, or several"
    assert blocks[0].strip() == markdown(read_records()), (
        "Replace what stands between the markers by the output of: python -m horovod_volo.bench table"
    )


def test_one_command_measures_all_of_it_again() -> None:
    shown = subprocess.run(
        [ROOT / "tools" / "bench", "--plan"], capture_output=True, text=True, check=True, timeout=20
    )
    newest = {record["name"]: record for record in read_records()}.values()
    recorded = {record["command"] for record in newest if record["hardware"]["gpu"] == "none"}
    assert recorded == set(shown.stdout.splitlines())
