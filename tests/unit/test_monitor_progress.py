"""The progress of a run and of a long operation: what is shown when, and how much time is left."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from horovod_volo.monitor.progress import RunLength, ThroughputLine, TrainingProgress

VALUES: dict[str, float | int] = {
    "loss": 2.34567,
    "lr": 1.5826e-3,
    "images_per_second": 437.4,
    "data_wait": 0.127,
}
LOGGED = "loss 2.346  lr 1.58e-03  437 images/s  data wait 13 %"


class FakeClock:
    """A clock that the test sets."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def train(progress: TrainingProgress, clock: FakeClock, steps: range, seconds: float) -> list[str]:
    """Take steps of so many seconds; return what there was to log."""
    logged = []
    for step in steps:
        clock.now += seconds
        if text := progress.step_done(step):
            logged.append(text)
    return logged


def test_throughput_in_a_file_is_printed_line_by_line(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    ThroughputLine("maps", shown=False)(1, 1)  # of another rank
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


def test_the_slow_first_step_does_not_count_for_the_time_left(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(100, 200, 100, 1))  # after a resume, so do those of the run before
    logged = train(progress, clock, range(101, 102), 600.0) + train(progress, clock, range(102, 151), 2.0)
    assert progress.format(150, VALUES) == f"step 150/200  75 %  epoch 1.5 of 2  {LOGGED}  1:40 left"
    assert ["10:00" in logged[0], "2.0 s: 3:12 left" in logged[1]] == [True, True]


def test_evaluations_count_for_the_time_left_once_one_was_made(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(0, 30, 10, 1))
    train(progress, clock, range(1, 11), 1.0)
    progress.evaluating(0, 50)
    clock.now += 7
    progress.evaluating(50, 50)
    train(progress, clock, range(11, 16), 1.0)
    assert progress.format(15, VALUES).endswith("  0:29 left")  # 15 steps and 2 evaluations


@pytest.mark.parametrize("every", [1, 2, 9])
def test_the_evaluations_to_come(every: int) -> None:
    """Against the rule of the loop: every so many epochs, and after the last one."""
    due = [10 * epoch for epoch in range(1, 6) if epoch % every == 0 or epoch == 5]
    length = RunLength(0, 50, 10, every)
    for step in range(51):
        assert length.evaluations_after(step) == sum(each > step for each in due)


def test_between_log_points_a_line_comes_every_30_seconds_in_a_file(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TrainingProgress(RunLength(0, 1000, 100, 1))
    train(progress, clock, range(1, 12), 4.0)
    assert capsys.readouterr().out == "step 8/1000   1 %  epoch 0.08 of 10  1:06:08 left\n"
    progress.format(11, VALUES)
    train(progress, clock, range(12, 17), 4.0)
    assert capsys.readouterr().out == f"step 16/1000   2 %  epoch 0.16 of 10  {LOGGED}  1:05:36 left\n"


def test_on_a_terminal_the_line_is_rewritten_every_second(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        progress = TrainingProgress(RunLength(0, 100, 10, 1))
        train(progress, clock, range(1, 6), 0.6)
        progress.show("short")
        progress.end_line()
        progress.end_line()  # the second call prints nothing
        print("next", flush=True)
        monkeypatch.undo()
        shown = ""
        while not shown.endswith("next\r\n"):
            shown += os.read(screen, 1000).decode()
    os.close(screen)
    lines = shown.split("\r")
    assert [line.split("  ")[0] for line in lines[1:3]] == ["step 2/100", "step 4/100"]
    # The terminal replaces each line feed by a carriage return and a line feed.
    assert lines[3:] == ["short".ljust(len(lines[2])), "\nnext", "\n"]
