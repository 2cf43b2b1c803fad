"""The documentation refers to files that exist; README.md lists the path of a gradient in eight files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horovod_volo"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def missing_files(text: str) -> list[str]:
    """Return the Python files and folders in backquotes that exist neither in the root nor in the package."""
    paths = re.findall(
        r"`((?:[\w.]+/)+\w+\.py|(?:models|kernels|engine|cluster|data|optim)/(?:\w+/)*)`", text
    )
    return [path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    assert missing_files(document.read_text(encoding="utf-8")) == []


def test_a_missing_file_is_found() -> None:
    text = (
        "`horovod_volo/train.py`, `engine/step.py`, `engine/steps.py`, `data/augmentation/`, `data/streams/`"
    )
    assert missing_files(text) == ["engine/steps.py", "data/streams/"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_to_a_file_and_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([\w./]+)(?:#([\w-]+))?\)", document.read_text(encoding="utf-8"))
    for file, heading in links:
        target = document.parent / file
        assert target.exists(), file
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_the_readme_gives_the_path_of_a_gradient_in_eight_files() -> None:
    listed = re.findall(
        r"^\d\. `(.+?)`", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(listed) == 8
    assert all((ROOT / path).is_file() for path in listed)
