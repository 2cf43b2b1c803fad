"""The progress line: what it says, and how it behaves on a terminal and in a file."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from horovod_volo.monitor.progress import Progress

VALUES: dict[str, float | int] = {
    "epoch": 3,
    "loss": 2.34567,
    "lr": 1.5826e-3,
    "images_per_second": 437.4,
    "data_wait": 0.127,
}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_the_line(clock: Clock) -> None:
    progress = Progress(first_step=0, total_steps=200)
    clock.now += 50
    assert progress.line(50, VALUES) == (
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
        (90, 95, 100, 10, "0:10"),  # after a resume the pace is that of this life
        (0, 100, 100, 10, "0:00"),
    ],
)
def test_the_time_left(
    first_step: int, step: int, total: int, seconds: float, left: str, clock: Clock
) -> None:
    progress = Progress(first_step=first_step, total_steps=total)
    clock.now += seconds
    assert progress.line(step, VALUES).split("  ")[-1] == f"{left} left"


def test_in_a_file_each_line_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(first_step=0, total_steps=2)
    progress.show("a longer line")
    progress.show("short")
    progress.clear()
    assert capsys.readouterr().out == "a longer line\nshort\n"


def test_on_a_terminal_the_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        progress = Progress(first_step=0, total_steps=2)
        progress.show("a longer line")
        progress.show("short")
        progress.clear()
        progress.clear()  # once is enough
        print("next", flush=True)
        monkeypatch.undo()
        shown = ""
        while not shown.endswith("next\r\n"):  # what is written comes in parts where the machine is busy
            shown += os.read(screen, 1000).decode()
    os.close(screen)
    # The terminal itself turns each line end into a return and a line feed.
    assert shown == "\ra longer line\rshort        \r\nnext\r\n"
