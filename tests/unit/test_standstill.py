"""A test that failed while the machine stood still is run again; another one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
import tests.standstill as standstill

standstill._QUIET = 0.1
runs, made = [], []

@pytest.fixture(scope="module")
def made_in_a_standstill():
    made.append(1)
    standstill.lateness[0] = 70.0
    assert len(made) > 1

def fails_first():
    runs.append(1)
    assert len(runs) > 1

def test_in_a_standstill():
    standstill.lateness[0] = 60.0
    fails_first()

def test_fails():
    runs.clear()
    fails_first()

def test_passes():
    assert runs == [1]

def test_of_a_fixture(made_in_a_standstill):
    assert made == [1, 1]
"""


def test_only_a_test_that_failed_in_a_standstill_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.standstill", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    (failed,) = (line for line in lines if line.startswith("FAILED"))
    assert "::test_fails" in failed
    again = [line for line in lines if line.startswith("run again")]
    assert ["for 60 s" in line for line in again] == [True, False]
    assert [line.rpartition("::")[2] for line in again] == ["test_in_a_standstill", "test_of_a_fixture"]
