"""Progress of a long operation, and its output on a terminal and in a file."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from horovod_volo.monitor.progress import ThroughputLine
from tests.unit.terminal import FakeClock, read, stop_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return stop_clock(monkeypatch)


def test_throughput_in_a_file_is_printed_line_by_line(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ThroughputLine("maps")
    progress(1000, 9000)
    clock.now += 20
    progress(3000, 9000)  # too soon after the first line
    clock.now += 20
    progress(5000, 9000)
    clock.now += 3600
    progress(9000, 9000)
    assert capsys.readouterr().err.splitlines() == [
        "1,000/9,000 maps",
        "5,000/9,000 maps, 100 per second, 0:40 left",
        "9,000/9,000 maps, 2 per second, 0:00 left",
    ]


def test_throughput_of_other_ranks_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ThroughputLine("maps", shown=False)(1, 1)
    assert capsys.readouterr().err == ""


def test_throughput_on_a_terminal_is_rewritten(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stderr", output)
        progress = ThroughputLine("maps")
        progress(0, 4)
        clock.now += 2
        progress(4, 4)
        monkeypatch.undo()
        shown = read(screen, ending="\r\n")
    os.close(screen)
    first, last = f"[{20 * '.'}] 0/4 maps", f"[{20 * '#'}] 4/4 maps, 2 per second, 0:00 left"
    assert shown == f"\r{first:<78}\r{last:<78}\r\n"
