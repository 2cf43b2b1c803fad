"""Named ranges of the steps of a rank: its phases and the model's blocks, as profilers and a trace show them.

A range is measured on the host. On a GPU it is the time in which the kernels were launched; the names reach
Nsight Systems as NVTX ranges, which have the kernels' own times below them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from horovod_volo.core.errors import UserError
from horovod_volo.monitor.stragglers import StepTimer

STEP, OWN_PART, EXCHANGE, UPDATE = "step", "forward and backward", "exchange", "update"


class Range(NamedTuple):
    """A range by name, in microseconds; `start` is since the epoch."""

    name: str
    start: float
    duration: float


def parse_steps(text: str) -> range:
    """Return the steps of --profile, FIRST:LAST or steps=FIRST:LAST; the first step of a run is 1."""
    first, colon, last = text.removeprefix("steps=").partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise UserError(f"--profile takes steps=FIRST:LAST, such as steps=10:20, not {text!r}.")
    return range(int(first), int(last) + 1)


class RangeRecorder:
    """Records nested ranges, and shows them to torch's profiler and on a GPU to NVTX."""

    def __init__(self, device: torch.device) -> None:
        self.ranges: list[Range] = []
        self._with_nvtx = device.type == "cuda"
        self._open: list[tuple[str, float, torch.profiler.record_function]] = []

    def push(self, name: str) -> None:
        """Begin a range."""
        shown = torch.profiler.record_function(name)
        shown.__enter__()  # type: ignore[no-untyped-call]
        if self._with_nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        self._open.append((name, time.time_ns() / 1e3, shown))

    def pop(self) -> None:
        """End the range that was begun last."""
        name, start, shown = self._open.pop()
        if self._with_nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        shown.__exit__(None, None, None)
        self.ranges.append(Range(name, start, time.time_ns() / 1e3 - start))

    def pop_all(self) -> None:
        """End all ranges."""
        while self._open:
            self.pop()


class RecordingTimer(StepTimer):
    """A timer of steps, which also records their phases. A log point meanwhile reads the timer's own sums."""

    def __init__(self, timer: StepTimer, recorder: RangeRecorder) -> None:
        self._timer, self._recorder = timer, recorder

    def reset(self) -> None:
        self._timer.reset()

    def begin(self) -> None:
        self._recorder.pop_all()  # the step before ends here, with what was done after its update
        self._recorder.push(STEP)
        self._recorder.push(OWN_PART)
        self._timer.begin()

    def end(self) -> None:
        self._timer.end()
        self._recorder.pop()
        self._recorder.push(EXCHANGE)

    def exchanged(self) -> None:
        self._timer.exchanged()
        self._recorder.pop()
        self._recorder.push(UPDATE)

    def seconds_per_step(self) -> float:
        return self._timer.seconds_per_step()

    def exchange_seconds(self) -> float:
        return self._timer.exchange_seconds()


def merged_trace(
    ranges: Sequence[Sequence[Range]], hosts: Sequence[str], timeline: Iterable[dict[str, Any]] = ()
) -> str:
    """Return the ranges of all ranks, and the messages of Horovod's timeline in them, as one trace.

    Its format is Chrome's: chrome://tracing and ui.perfetto.dev open it.
    """
    events: list[dict[str, Any]] = []
    for rank, (of_rank, host) in enumerate(zip(ranges, hosts, strict=True)):
        events += [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} on {host}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
            *(
                {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": rank, "tid": 0}
                for name, start, duration in of_rank
            ),
        ]
    first = min((each.start for of_rank in ranges for each in of_rank), default=0.0)
    last = max((each.start + each.duration for of_rank in ranges for each in of_rank), default=0.0)
    messages = [event for event in timeline if "ts" not in event or first <= event["ts"] <= last]
    if any("ts" in event for event in messages):
        events += [_of_horovod(event, len(ranges)) for event in messages]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def read_timeline(text: str) -> list[dict[str, Any]]:
    """Return the events of Horovod's timeline, with times since the epoch; it may still be written."""
    end = text.rfind("}")
    try:
        events = json.loads(text[: end + 1].rstrip().rstrip(",") + "]")
        epoch = next(event["args"]["start_time_since_epoch_in_micros"] for event in events if "args" in event)
    except (ValueError, StopIteration, KeyError):
        return []
    return [{**event, "ts": epoch + event["ts"]} if "ts" in event else event for event in events]


def _of_horovod(event: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return an event of Horovod's timeline, whose processes are messages, with a number after the ranks'."""
    name = event.get("args", {}).get("name", "")
    args = {"args": {"name": f"Horovod: {name}"}} if event.get("name") == "process_name" else {}
    return {**event, **args, "pid": ranks + event["pid"]}
