"""The calls of the first run on a GPU machine: what they keep, what they repeat, and what comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def write_script(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a checkout whose programs only note that they were called; the tests fail at the first call."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "out").mkdir()
    shutil.copy(ROOT / "tools" / "gpu_first_run", tmp_path / "tools")
    write_script(tmp_path / "bin" / "nvidia-smi", "echo GPU 0")
    write_script(tmp_path / "bin" / "python3", 'echo "$@"', 'echo "$@" >>"$results/python.txt"')
    write_script(
        tmp_path / "tools" / "gpu_check",
        'echo "$1 with $ARCHIVE"',
        'mkdir -p "$OUT/profiles"; echo >"$OUT/profiles/volo_d1.json.gz"',
        '[ -e "$OUT/again" ] || { touch "$OUT/again"; exit 3; }',
    )
    return tmp_path


def call(machine: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(machine / "tools" / "gpu_first_run"), name],
        env=os.environ | {"OUT": str(machine / "out"), "PATH": f"{machine / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_line_that_failed_is_repeated_and_one_that_succeeded_is_not(machine: Path) -> None:
    failed = call(machine, "tests")
    assert failed.returncode == 1
    assert "FAILED with status 3: tests" in failed.stdout
    assert "Failed: tests. Logs: " in failed.stderr
    assert call(machine, "tests").returncode == 0
    assert call(machine, "tests").returncode == 0
    kept = machine / "runs" / "gpu_first_run"
    assert (kept / "tests.log").read_text() == "tests with build/gpu_archive\n" * 2
    assert (kept / "finished.txt").read_text() == "tests\n"
    with tarfile.open(machine / "out" / "results.tar.gz") as results:
        names = set(results.getnames())
    assert {"./tests.log", "./finished.txt", "./times.txt"} <= names
    assert not any(name.endswith(".json.gz") for name in names)
    assert (machine / "out" / "volo_d1.json.gz").exists()


def test_the_first_call_leaves_what_gpu_bench_continues_from(machine: Path) -> None:
    done = call(machine, "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = machine / "runs" / "gpu_first_run"
    plan = (ROOT / "tools" / "gpu_bench").read_text()
    measured = (kept / "measured.txt").read_text().splitlines()
    assert len(measured) == 2
    assert all(f" {words}\n" in plan for words in measured)
    assert len((kept / "results.jsonl").read_text().splitlines()) == 2
    assert "tests/gpu/test_residual.py" in (kept / "python.txt").read_text()


def test_an_unknown_call_is_refused(machine: Path) -> None:
    assert call(machine, "benches").returncode == 2
