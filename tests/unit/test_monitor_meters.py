"""Losses, times and ranks that are slower between log points, the words of a profile, and progress lines."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import parse_steps
from horovod_volo.monitor import meters
from horovod_volo.monitor.progress import RunLength, ThroughputLine, TrainingProgress
from horovod_volo.profiler.step_profiler import DATA, describe

CPU = torch.device("cpu")
EVEN = [meters.OwnTime(0.100), meters.OwnTime(0.104), meters.OwnTime(0.097)]
SLOW = [meters.OwnTime(0.100), meters.OwnTime(0.151, 0.05), meters.OwnTime(0.097)]


class FakeClock:
    """A clock that the test sets."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def meter() -> meters.LossMeter:
    return meters.LossMeter(("total", "class_loss"), CPU, lambda: 10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_values_are_not_lost_beside_large_ones(dtype: torch.dtype) -> None:
    losses, large = meter(), torch.tensor(2.0**15, dtype=dtype)
    for value in (*[large] * 512, *[torch.tensor(0.25, dtype=dtype)] * 100):
        losses.add((value, torch.tensor(0.5)))
    assert losses.sums() == {"total": 2.0**24 + 25, "class_loss": 306.0, "finite": 612.0}


@pytest.mark.parametrize("values", [("nan", "inf"), ("nan", "1"), ("1", "-inf")])
def test_micro_batches_that_are_not_finite_are_not_in_the_sums(values: tuple[str, str]) -> None:
    losses = meter()
    losses.add(tuple(torch.tensor(float(value)) for value in values))
    losses.add((torch.tensor(1.0), torch.tensor(2.0)))
    assert losses.sums() == {"total": 1.0, "class_loss": 2.0, "finite": 1.0}
    assert losses.micro_batches == 2
    losses.reset()
    assert losses.sums() == {"total": 0.0, "class_loss": 0.0, "finite": 0.0}
    assert losses.micro_batches == 0


def test_adding_does_not_keep_the_graph_alive() -> None:
    loss, losses = torch.full((), 2.0, requires_grad=True).square(), meter()
    losses.add((loss, loss))
    assert losses.sums()["total"] == 4.0
    kept = [value for value in vars(losses).values() if isinstance(value, Tensor)]
    assert kept
    assert not any(value.requires_grad for value in kept)


def test_timers_count_from_the_reset(clock: FakeClock) -> None:
    data = SimpleNamespace(waited=10.0)
    losses = meters.LossMeter(("total",), CPU, lambda: data.waited)
    clock.now += 4
    data.waited += 1.5
    assert (losses.seconds, losses.data_wait_seconds) == (4.0, 1.5)
    losses.reset()
    assert (losses.seconds, losses.data_wait_seconds) == (0.0, 0.0)


def test_the_parts_of_a_step_are_measured(clock: FakeClock) -> None:
    timer, phases = meters.StepTimer(CPU), list[str]()
    timer.on_phase = phases.append
    assert timer.seconds_per_step() == 0.0
    for _ in range(2):
        timer.begin()
        clock.now += 2
        timer.end()
        clock.now += 5  # waits for others
        timer.exchanged()
        clock.now += 1
    assert (timer.seconds_per_step(), timer.exchange_seconds()) == (2.0, 10.0)
    assert phases == 2 * ["forward and backward", "exchange", "update"]
    timer.reset()
    assert (timer.seconds_per_step(), timer.exchange_seconds()) == (0.0, 0.0)


def test_a_straggler_is_named_at_the_second_log_point_and_once() -> None:
    ranks = meters.StragglerFinder(["red", "green", "blue"])
    found = [ranks.find(times) for times in (EVEN, SLOW, SLOW, SLOW, EVEN, SLOW, SLOW)]
    named = ["rank 1 on green" in message if message else None for message in found]
    assert named == [None, None, True, None, None, None, True]
    assert all(number in str(found[2]) for number in ("151 ms", "100 ms", "50 ms"))


@pytest.mark.parametrize(
    "log_points",
    [
        [[0.2, 0.1, 0.1], [0.1, 0.2, 0.1], [0.1, 0.1, 0.2], [0.2, 0.1, 0.1]],  # another one each time
        2 * [[0.0010, 0.0010, 0.0059]],
        2 * [[1.0, 1.0, 1.09]],
    ],
)
def test_noise_is_not_named(log_points: list[list[float]]) -> None:
    ranks = meters.StragglerFinder(["red", "green", "blue"])
    assert not any(ranks.find([meters.OwnTime(seconds) for seconds in times]) for times in log_points)


def test_the_steps_are_read() -> None:
    assert parse_steps("steps=10:20") == parse_steps("10:20") == range(10, 21)
    for wrong in ("steps=", "10", "0:3", "5:4", "a:b", "steps=3:", "1:2:3"):
        with pytest.raises(UserError, match="--profile"):
            parse_steps(wrong)


def times_of(*seconds: float) -> dict[str, float]:
    return dict(zip((meters.OWN_PART, DATA, meters.EXCHANGE, meters.UPDATE), seconds, strict=True))


@pytest.mark.parametrize(
    ("times", "device", "first"),
    [
        ([times_of(0.6, 0.3, 0.05, 0.05)], "CPU", "--workers"),
        ([times_of(0.5, 0.05, 0.4, 0.05)] * 2, "CPU", "--compression"),
        ([times_of(0.5, 0.0, 0.4, 0.1)] * 3 + [times_of(0.9, 0.0, 0.0, 0.1)], "GPU", "slowest rank"),
        ([times_of(0.6, 0.0, 0.0, 0.4)], "CPU", "--shard-optimizer"),
        ([times_of(0.9, 0.0, 0.05, 0.05)], "GPU", "--precision bf16"),
        ([times_of(0.9, 0.0, 0.05, 0.05)], "CPU", "this is a CPU"),
    ],
)
def test_the_words_name_what_to_change_first(times: list[dict[str, float]], device: str, first: str) -> None:
    text = describe(range(3, 6), times, ["a", "b", "c", "d"], Counter(mm=3, add=1), device)
    assert all(part in text for part in ("1000.0 ms", "steps 3 to 5", "mm 75 %, add 25 %"))
    assert first in text.partition("To change first: ")[2]
    assert ("3 on d: 900.0 ms" in text) == (len(times) == 4)


VALUES: dict[str, float | int] = {
    "loss": 2.34567,
    "lr": 1.5826e-3,
    "images_per_second": 437.4,
    "data_wait": 0.127,
}
LOGGED = "loss 2.346  lr 1.58e-03  437 images/s  data wait 13 %"


def train(progress: TrainingProgress, clock: FakeClock, steps: range, seconds: float) -> list[str]:
    """Take steps of so many seconds; return what there was to log."""
    logged = []
    for step in steps:
        clock.now += seconds
        if text := progress.step_done(step):
            logged.append(text)
    return logged


def test_throughput_in_a_file_is_printed_line_by_line(clock, capsys):
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


def test_between_log_points_a_line_comes_every_30_seconds_in_a_file(clock, capsys):
    progress = TrainingProgress(RunLength(0, 1000, 100, 1))
    train(progress, clock, range(1, 12), 4.0)
    assert capsys.readouterr().out == "step 8/1000   1 %  epoch 0.08 of 10  1:06:08 left\n"
    progress.format(11, VALUES)
    train(progress, clock, range(12, 17), 4.0)
    assert capsys.readouterr().out == f"step 16/1000   2 %  epoch 0.16 of 10  {LOGGED}  1:05:36 left\n"
