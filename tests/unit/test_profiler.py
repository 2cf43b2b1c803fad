"""Profiles of steps: the ranges of their phases, their trace with Horovod's timeline, and the words."""

from __future__ import annotations

import json

import pytest
import torch

from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import parse_steps
from horovod_volo.monitor.meters import StepTimer
from horovod_volo.profiler.step_profiler import (
    Range,
    RangeRecorder,
    RankTimes,
    describe,
    merged_trace,
    read_timeline,
    times_of,
)

CPU = torch.device("cpu")
# As Horovod 0.28.1 writes it; the last event is cut off.
TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000000}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "bucket.0"}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 50, "pid": 1},
{"ph": "X", "name": "1", "ts": 60, "pid": 1, "dur": 0},
{"ph": "E", "ts": 70, "pid": 1},{"ph": "B", "name": "ALLREDUCE", "ts": 900, "pid": 1},{"ph": "E", "ts": 95"""


def test_the_steps_are_read() -> None:
    assert parse_steps("steps=10:20") == parse_steps("10:20") == range(10, 21)
    for wrong in ("steps=", "10", "0:3", "5:4", "a:b", "steps=3:", "1:2:3"):
        with pytest.raises(UserError, match="--profile"):
            parse_steps(wrong)


def test_a_step_is_divided_into_its_phases() -> None:
    recorder = RangeRecorder(CPU)
    timer = StepTimer(CPU)
    timer.on_phase = recorder.begin_phase
    for _ in range(2):
        timer.begin()
        recorder.push("block")
        recorder.pop()
        timer.end()
        timer.exchanged()
    recorder.pop_all()
    own = ["block", "forward and backward", "exchange", "update", "step"]
    assert [each.name for each in recorder.ranges] == 2 * own
    by_name = {each.name: each for each in recorder.ranges[5:]}
    parts = sum(by_name[name].duration for name in ("forward and backward", "exchange", "update"))
    assert 0 < parts <= by_name["step"].duration


def test_times_are_means_over_steps() -> None:
    lengths = {"forward and backward": 60e3, "exchange": 20e3, "update": 10e3, "block": 5e3, "step": 100e3}
    ranges = [Range(name, 0.0, length) for name, length in lengths.items()] * 4
    times = times_of(ranges, waited_seconds=0.08)
    found = (times.step, times.own_part, times.data, times.exchange, times.update, times.other)
    assert found == pytest.approx((0.1, 0.04, 0.02, 0.02, 0.01, 0.01))


def test_the_trace_has_the_ranges_of_all_ranks_and_horovods_messages_in_them() -> None:
    ranges = ([Range("step", 1_000_040.0, 100.0)], [Range("step", 1_000_045.0, 90.0)])
    trace = json.loads(merged_trace(ranges, ["a", "b"], read_timeline(TIMELINE)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event.get("name") == "process_name"}
    assert names == {0: "rank 0 on a", 1: "rank 1 on b", 2: "Horovod: ", 3: "Horovod: bucket.0"}
    shown = [(event["pid"], event.get("name"), event["ts"]) for event in trace if "ts" in event]
    assert shown == [
        (0, "step", 1_000_040.0),
        (1, "step", 1_000_045.0),
        (3, "NEGOTIATE_ALLREDUCE", 1_000_050),
        (3, "1", 1_000_060),  # rank 1 was ready
        (3, None, 1_000_070),
    ]


def test_a_timeline_that_cannot_be_read_is_left_out() -> None:
    assert read_timeline("") == read_timeline("[\n") == read_timeline("{}") == []
    ranges = ([Range("step", 5.0, 1.0)],)
    later = json.loads(merged_trace(ranges, ["a"], read_timeline(TIMELINE)))["traceEvents"]
    assert not [event for event in later if "Horovod" in str(event)]  # no message is in the range


@pytest.mark.parametrize(
    ("times", "on_gpu", "first"),
    [
        ([RankTimes(1.0, 0.6, 0.3, 0.05, 0.05)], False, "--workers"),
        ([RankTimes(1.0, 0.5, 0.05, 0.4, 0.05)] * 2, False, "--compression"),
        (
            [RankTimes(1.0, 0.5, 0.0, 0.4, 0.1)] * 3 + [RankTimes(1.0, 0.9, 0.0, 0.0, 0.1)],
            True,
            "slowest rank",
        ),
        ([RankTimes(1.0, 0.6, 0.0, 0.0, 0.4)], False, "--shard-optimizer"),
        ([RankTimes(1.0, 0.9, 0.0, 0.05, 0.05)], True, "--precision bf16"),
        ([RankTimes(1.0, 0.9, 0.0, 0.05, 0.05)], False, "this is a CPU"),
    ],
)
def test_the_words_name_what_to_change_first(times: list[RankTimes], on_gpu: bool, first: str) -> None:
    text = describe(range(3, 6), times, ["a", "b", "c", "d"], {"mm": 3.0, "add": 1.0}, on_gpu=on_gpu)
    assert all(part in text for part in ("1000.0 ms", "steps 3 to 5", "mm 75 %, add 25 %"))
    assert first in text.partition("To change first: ")[2]
    assert ("3 on d: 900.0 ms" in text) == (len(times) == 4)
