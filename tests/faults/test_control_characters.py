"""Names with control characters are escaped in what is printed and logged."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from horovod_volo.cluster.launch_env import ALONE
from horovod_volo.doctor.report import build_report, format_report, warning
from tests.runs import FAILED, only_error, start

NAME, ESCAPED = "a\x1b[31mb\nc\x9b", r"a\x1b[31mb\nc\x9b"


@pytest.fixture
def images(demo_images, tmp_path: Path) -> Path:
    """Copy a demo set; name a class so, and a damaged image in it, whose name is not UTF-8 either."""
    folder = shutil.copytree(demo_images(40, 20), tmp_path / "set")
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


def test_a_run_logs_them_escaped(images, tmp_path):
    shown = start(images, tmp_path, ranks=1)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    for text in (shown, log):
        assert_printable(text)
        left_out = [line for line in text.splitlines() if "left out: " in line]
        assert len(left_out) == 2
        assert all(f"{ESCAPED}/{ESCAPED}\\udcff.jpg" in line for line in left_out)


def test_an_error_of_ranks_about_a_damaged_image_is_one_line(images, tmp_path):
    settings = {"start_with": "mpi", "status": FAILED, "seconds": 60}
    shown = start(images, tmp_path, "--bad-samples", "fail", **settings)
    assert_printable(shown)
    error = only_error(shown, ESCAPED)
    assert "horovod_volo" not in shown.replace(error, ""), "there is a traceback of the package"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("pack", ["{set}", "{out}"]),
        ("pack", ["{missing}", "{out}"]),
        ("labels", ["verify", "{missing}"]),
        ("export", ["{missing}", "{out}"]),
        ("evaluate", ["{missing}", "--weights", "{missing}"]),
        ("train", ["{set}", "--recipe", "{missing}"]),
    ],
)
def test_other_commands_escape_them(images, tmp_path, capfd, command, arguments):
    places = {"set": images, "missing": tmp_path / NAME, "out": tmp_path / "out"}
    main = import_module(f"horovod_volo.{command}").main
    assert main([word.format(**places) for word in arguments]) in (1, 2)
    shown = "".join(capfd.readouterr())
    assert ESCAPED in shown
    assert_printable(shown)


def test_the_report_of_the_doctor_escapes_them():
    found = warning(f"{NAME} is slow", f"Rename {NAME}.")
    text = format_report(build_report(ALONE, [[found]], ["host"], "none"))
    assert_printable(text)
    assert text.count(ESCAPED) == 2
