"""docs/migration.md lists every flag of the published main.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.published.checkouts import named_folder
from tests.published.test_defaults import published_flags

FOLDER = named_folder()
DOCUMENT = Path(__file__).parents[2] / "docs" / "migration.md"


@pytest.mark.parametrize("repository", ["volo", "TokenLabeling"])
def test_every_published_flag_is_listed(repository: str) -> None:
    text = (
        DOCUMENT.read_text(encoding="utf-8").partition("## From sail-sg/volo")[2].partition("## From timm")[0]
    )
    firsts = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", firsts))
    long = [flag for flag in published_flags(FOLDER / repository / "main.py") if flag.startswith("--")]
    assert len(long) > 90
    others = {"--config", "--dr"}  # -c and --decay-rate are the same flags
    assert set(long) - listed == others
