"""The recorded commit of a run is marked if any file of the package differs from it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from horovod_volo.core import environment


def test_a_change_anywhere_in_the_package_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "horovod_volo"
    package.mkdir()
    (package / "volo.py").write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr(environment, "PACKAGE", package)
    commit = environment.code_commit()
    assert len(commit) == 12
    (tmp_path / "notes.txt").write_text("not of the package, and untracked")
    assert environment.code_commit() == commit
    (package / "volo.py").write_text("changed = True\n")
    assert environment.code_commit() == f"{commit}+changes"
    shutil.rmtree(tmp_path / ".git")
    assert environment.code_commit() == "not a git checkout"
