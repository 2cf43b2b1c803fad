"""The text of the progress lines, and their output on a terminal and in a file."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from horovod_volo.monitor.progress import ThroughputLine, TrainingProgress

VALUES: dict[str, float | int] = {
    "epoch": 3,
    "loss": 2.34567,
    "lr": 1.5826e-3,
    "images_per_second": 437.4,
    "data_wait": 0.127,
}


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def read(screen: int, *, ending: str) -> str:
    """Read the output of a terminal up to `ending`."""
    shown = b""
    while not shown.endswith(ending.encode()):
        shown += os.read(screen, 1000)
    return shown.decode()


def test_a_log_point_is_formatted(clock: FakeClock) -> None:
    progress = TrainingProgress(first_step=0, total_steps=200)
    clock.now += 50
    assert progress.format(50, VALUES) == (
        "step 50/200  25 %  epoch 3  loss 2.346  lr 1.58e-03  437 images/s  data wait 13 %  2:30 left"
    )


@pytest.mark.parametrize(
    ("first_step", "step", "total", "seconds", "left"),
    [
        (0, 1, 2, 59.4, "0:59"),
        (0, 1, 2, 60, "1:00"),
        (0, 1, 2, 59.6, "1:00"),
        (0, 1, 2, 3599, "59:59"),
        (0, 1, 2, 3600, "1:00:00"),
        (0, 1, 101, 3661, "101:41:40"),
        (90, 95, 100, 10, "0:10"),  # after a resume only the steps of this process count
        (0, 100, 100, 10, "0:00"),
    ],
)
def test_the_time_left(
    first_step: int, step: int, total: int, seconds: float, left: str, clock: FakeClock
) -> None:
    progress = TrainingProgress(first_step=first_step, total_steps=total)
    clock.now += seconds
    assert progress.format(step, VALUES).split("  ")[-1] == f"{left} left"


def test_in_a_file_every_line_is_separate(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(first_step=0, total_steps=2)
    progress.show("a longer line")
    progress.show("short")
    progress.end_line()
    assert capsys.readouterr().out == "a longer line\nshort\n"


def test_on_a_terminal_the_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        progress = TrainingProgress(first_step=0, total_steps=2)
        progress.show("a longer line")
        progress.show("short")
        progress.end_line()
        progress.end_line()  # the second call prints nothing
        print("next", flush=True)
        monkeypatch.undo()
        shown = read(screen, ending="next\r\n")
    os.close(screen)
    # The terminal replaces each line feed by a carriage return and a line feed.
    assert shown == "\ra longer line\rshort        \r\nnext\r\n"


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
    last = "4/4 maps, 2 per second, 0:00 left"
    assert shown == f"\r{'0/4 maps':<78}\r{last:<78}\r\n"
