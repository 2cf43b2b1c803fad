"""Names with control characters are escaped in what is printed and logged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod_volo.cluster.launch_env import ALONE
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.doctor.report import build_report, format_report, warning
from tests.faults.runs import SMALL, only_error, start
from tests.ranks.launching import python, run, train

NAME, ESCAPED = "a\x1b[31mb\nc\x9b", r"a\x1b[31mb\nc\x9b"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Make a demo set with such a class and a damaged image in it, whose name is not UTF-8 either."""
    folder = tmp_path / "set"
    make_demo_set(folder, train=40, val=20)
    for split in ("train", "val"):
        (folder / split / "ring").rename(folder / split / NAME)
        first = min((folder / split / NAME).iterdir())
        damaged = first.with_name(f"{NAME}{os.fsdecode(bytes([0xFF]))}.jpg")
        damaged.write_bytes(first.read_bytes()[:300])
        first.unlink()
    return folder


def assert_printable(text: str) -> None:
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert "\x9b" not in text


def test_a_run_logs_them_escaped(images: Path, tmp_path: Path) -> None:
    arguments = (str(images), *SMALL, "--output", str(tmp_path / "runs"), "--name", "run")
    done = train(*arguments, ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    assert_printable(done.stdout)
    log = (tmp_path / "runs" / "run" / "log.txt").read_text(encoding="utf-8")
    assert_printable(log)
    named = f"{ESCAPED}/{ESCAPED}\\udcff.jpg"
    for text in (done.stdout, log):
        left_out = [line for line in text.splitlines() if "left out: " in line]
        assert len(left_out) == 2
        assert all(named in line for line in left_out)


def test_an_error_of_ranks_is_one_line(images: Path, tmp_path: Path) -> None:
    status, shown = start(images, tmp_path / "runs", "--bad-samples", "fail", start_with="mpi")
    assert status not in (0, 75)
    assert_printable(shown)
    assert only_error(shown, ESCAPED)


def test_other_commands_escape_them(images: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / NAME)
    for words in (
        ["pack", str(images), str(tmp_path / "out")],
        ["pack", missing, str(tmp_path / "out")],
        ["labels", "verify", missing],
        ["export", missing, str(tmp_path / "exported")],
        ["evaluate", missing, "--weights", missing],
        ["train", str(images), "--recipe", missing],
    ):
        done = run([*python(), "-m", f"horovod_volo.{words[0]}", *words[1:]])
        assert done.returncode in (1, 2), words
        assert ESCAPED in done.stdout, words
        assert_printable(done.stdout)


def test_the_report_of_the_doctor_escapes_them() -> None:
    found = warning(f"{NAME} is slow", f"Rename {NAME}.")
    text = format_report(build_report(ALONE, [[found]], ["host"], "none"))
    assert_printable(text)
    assert text.count(ESCAPED) == 2
