"""The documentation refers to files that exist; README.md lists the path of a gradient in eight files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horovod_volo"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_of_a_document_exist(document: Path) -> None:
    assert missing_files(document.read_text(encoding="utf-8")) == []
    assert dead_links(document) == []


def test_a_missing_file_and_a_dead_link_are_found(tmp_path: Path) -> None:
    files = (
        "`horovod_volo/train.py`, `engine/step.py`, `engine/steps.py`, `data/augmentation/`, `data/streams/`"
    )
    assert missing_files(files) == ["engine/steps.py", "data/streams/"]
    document = tmp_path / "document.md"
    document.write_text(
        "# A (b), c\n[x](#a-b-c) [x](#b) [x](document.md#a-b-c) ![y](none.svg) [z](https://a/b)"
    )
    assert dead_links(document) == ["#b", "none.svg"]


def test_the_readme_gives_the_path_of_a_gradient_in_eight_files() -> None:
    listed = re.findall(
        r"^\d\. `(.+?)`", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(listed) == 8
    assert all((ROOT / path).is_file() for path in listed)
