"""The progress of a run: first steps, log points, evaluations and time left; on a terminal and in a file."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from horovod_volo.monitor.training_progress import RunLength, TrainingProgress
from tests.unit.terminal import FakeClock, read, stop_clock

VALUES: dict[str, float | int] = {
    "loss": 2.34567,
    "lr": 1.5826e-3,
    "images_per_second": 437.4,
    "data_wait": 0.127,
}
LOGGED = "loss 2.346  lr 1.58e-03  437 images/s  data wait 13 %"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return stop_clock(monkeypatch)


def train(progress: TrainingProgress, clock: FakeClock, steps: range, seconds: float) -> list[str]:
    """Take steps of so many seconds; return what there was to log."""
    logged = []
    for step in steps:
        clock.now += seconds
        if text := progress.step_done(step):
            logged.append(text)
    return logged


def test_the_first_step_says_what_it_took_and_the_next_what_one_costs(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(0, 200, 100, 1))
    logged = train(progress, clock, range(1, 2), 95.0) + train(progress, clock, range(2, 10), 0.5)
    assert logged == [
        "first step done after 1:35, with reading ahead and what is compiled",
        "one step takes 500 ms: 1:38 left; evaluations come on top",
    ]


def test_a_log_point_is_formatted(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(0, 200, 100, 1))
    train(progress, clock, range(1, 51), 1.0)
    assert progress.format(50, VALUES) == f"step 50/200  25 %  epoch 0.5 of 2  {LOGGED}  2:30 left"


def test_the_slow_first_step_does_not_count_for_the_time_left(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(100, 200, 100, 1))  # after a resume, so do those of the run before
    train(progress, clock, range(101, 102), 600.0)
    train(progress, clock, range(102, 151), 2.0)
    assert progress.format(150, VALUES).endswith("  1:40 left")


def test_evaluations_count_for_the_time_left_once_one_was_made(clock: FakeClock) -> None:
    progress = TrainingProgress(RunLength(0, 30, 10, 1))
    train(progress, clock, range(1, 11), 1.0)
    progress.evaluating(0, 50)
    clock.now += 7
    progress.evaluating(50, 50)
    train(progress, clock, range(11, 16), 1.0)
    assert progress.format(15, VALUES).endswith("  0:29 left")  # 15 steps and 2 evaluations


@pytest.mark.parametrize(
    ("step", "every", "evaluations"),
    [
        (0, 1, 5),
        (9, 1, 5),
        (10, 1, 4),
        (49, 1, 1),
        (50, 1, 0),
        (0, 2, 3),
        (20, 2, 2),
        (40, 2, 1),
        (0, 9, 1),
    ],
)
def test_the_evaluations_to_come(step: int, every: int, evaluations: int) -> None:
    """Against the rule of the loop: every so many epochs, and after the last one."""
    due = [10 * epoch for epoch in range(1, 6) if epoch % every == 0 or epoch == 5]
    assert len([each for each in due if each > step]) == evaluations
    assert RunLength(0, 50, 10, every).evaluations_after(step) == evaluations


def test_between_log_points_a_line_comes_every_30_seconds_in_a_file(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TrainingProgress(RunLength(0, 1000, 100, 1))
    train(progress, clock, range(1, 12), 4.0)
    assert capsys.readouterr().out == "step 8/1000   1 %  epoch 0.08 of 10  1:06:08 left\n"
    progress.format(11, VALUES)
    train(progress, clock, range(12, 17), 4.0)
    assert capsys.readouterr().out == f"step 16/1000   2 %  epoch 0.16 of 10  {LOGGED}  1:05:36 left\n"


def test_an_evaluation_shows_its_progress_and_time_left(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TrainingProgress(RunLength(0, 10, 10, 1))
    progress.evaluating(0, 4000)
    for done in (100, 1000, 1100):
        clock.now += 20
        progress.evaluating(done, 4000)
    progress.evaluating(4000, 4000)
    assert capsys.readouterr().out == f"evaluating [{5 * '#'}{15 * '.'}] 1,000/4,000 images, 2:00 left\n"


def test_on_a_terminal_the_line_moves_every_second(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        progress = TrainingProgress(RunLength(0, 100, 10, 1))
        train(progress, clock, range(1, 6), 0.6)
        progress.end_line()
        monkeypatch.undo()
        shown = read(screen, ending="\r\n")
    os.close(screen)
    lines = [line.split("  ")[0] for line in shown.split("\r") if line.strip()]
    assert lines == ["step 2/100", "step 4/100"]


def test_in_a_file_every_line_is_separate(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(RunLength(0, 2, 2, 1))
    progress.show("a longer line")
    progress.show("short")
    progress.end_line()
    assert capsys.readouterr().out == "a longer line\nshort\n"


def test_on_a_terminal_the_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        progress = TrainingProgress(RunLength(0, 2, 2, 1))
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
