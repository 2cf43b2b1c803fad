"""The recorded commit of a run is marked if any file of the package differs from it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from horovod_volo.core import environment


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package in a new git repository, with a copy of core/environment.py and one other file."""
    package = tmp_path / "horovod_volo"
    (package / "core").mkdir(parents=True)
    (package / "models").mkdir()
    shutil.copy(environment.__file__, package / "core")
    (package / "models" / "volo.py").write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return package


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("copied", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_anywhere_in_the_package_is_marked(package: Path) -> None:
    copied = load(package / "core" / "environment.py")
    commit = copied.code_commit()
    assert len(commit) == 12
    (package.parent / "notes.txt").write_text("not of the package, and untracked")
    assert copied.code_commit() == commit
    (package / "models" / "volo.py").write_text("changed = True\n")
    assert copied.code_commit() == f"{commit}+changes"


def test_without_git_the_commit_is_unknown(package: Path) -> None:
    shutil.rmtree(package.parent / ".git")
    assert load(package / "core" / "environment.py").code_commit() == "not a git checkout"
