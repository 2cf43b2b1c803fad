"""Files and links of the documentation exist, also those of README.md, which mkdocs does not read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "horovod_volo"


def missing_files(text: str) -> list[str]:
    """Return the Python files and folders in backquotes that exist neither in the root nor in the package."""
    paths = re.findall(
        r"`((?:[\w.]+/)+\w+\.py|(?:models|kernels|engine|cluster|data|optim)/(?:\w+/)*)`", text
    )
    return [path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()]


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(document: Path) -> list[str]:
    """Return the links and pictures of a document that lead to no file, or to no heading of a document."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "mailto:")):
            continue
        file, _, heading = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_links_of_a_document_exist(document: str) -> None:
    assert missing_files((ROOT / document).read_text(encoding="utf-8")) == []
    assert dead_links(ROOT / document) == []
