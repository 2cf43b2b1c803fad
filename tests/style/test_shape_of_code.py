"""Limits on the length of modules and functions, and on names; no leftovers in the repository."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horovod_volo"
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def test_modules_and_functions_are_short() -> None:
    assert [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 300] == []
    functions = {
        f"{name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [name for name, lines in functions.items() if lines > 60] == []


@pytest.mark.parametrize(("benchmarks", "modules", "lines"), [(False, 216, 29_228), (True, 14, 1_767)])
def test_the_package_does_not_grow_unnoticed(benchmarks: bool, modules: int, lines: int) -> None:
    """A change that raises a number here removes as many lines or modules elsewhere, and says which."""
    counted = [path for name, path in MODULES.items() if name.startswith("horovod_volo/bench/") == benchmarks]
    assert len(counted) <= modules
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in counted) <= lines


def test_class_names_are_unique() -> None:
    """In the package and the tests together; `Name` and `_Name` count as the same name."""
    files = (ROOT / "tests").rglob("*.py")
    parsed = [*trees().values(), *(ast.parse(path.read_text()) for path in files)]
    names = Counter(
        node.name.lstrip("_") for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_module_names_are_specific() -> None:
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in MODULES.values()}
    assert names & VAGUE_NAMES == set()
    assert names & sys.stdlib_module_names == set()


def test_images_are_opened_in_one_module() -> None:
    opening = [name for name, path in MODULES.items() if "Image.open(" in path.read_text(encoding="utf-8")]
    assert opening == ["horovod_volo/data/reading.py"]


def test_no_unfinished_work_and_no_local_paths() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    # Marks of unfinished work and paths of a developer's machine, written so that this file does not match.
    left = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X])\b|(?<![\w./~$}-])/(root|work|home/[a-z]\w*)/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if not file.is_file() or b"\0" in file.read_bytes():
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [f"{name}:{number}" for number, line in enumerate(lines, 1) if left.search(line)]
    assert found == []
