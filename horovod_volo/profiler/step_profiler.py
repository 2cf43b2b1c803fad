"""`--profile`: records some steps of all ranks, and writes traces and a paragraph on where the time went.

All ranks record, so that none becomes slower than the others; rank 0 writes. A range is measured on the host.
On a GPU it is the time in which the kernels were launched; the names reach Nsight Systems as NVTX ranges,
which have the kernels' own times below them.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.engine.callbacks import PROFILERS, Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.compiled import find_blocks
from horovod_volo.monitor.meters import EXCHANGE, OWN_PART, UPDATE, ignore

FOLDER = "profile"  # in the run folder
STEP = "step"
_MOST_SHOWN = 5
_ADVICE = {
    "data": "reading. Give each rank more cores or --workers, pack the images into shards and shrink them "
    "(horovod-volo pack --resize), or use lighter augmentation (--aa).",
    "straggler": "the slowest rank. All others wait for it: look at its host with horovod-volo doctor.",
    "exchange": "the exchange. A larger --batch-size or --accumulation sends the same gradients less often; "
    "--compression fp16 halves them; horovod-volo doctor measures the network.",
    "update": "the update. A larger --batch-size makes it rarer; --shard-optimizer divides it by the ranks.",
    "arithmetic": "arithmetic: this is a CPU. A smaller --img-size or --model is faster, and so is a GPU.",
    "arithmetic on a GPU": "arithmetic. Try --precision bf16 and --compile, then a larger --batch-size.",
}


class Range(NamedTuple):
    """A range by name, in microseconds; `start` is since the epoch."""

    name: str
    start: float
    duration: float


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

    def begin_phase(self, name: str) -> None:
        """End the phase under way, and begin the next one; a step begins with its first phase."""
        if name == OWN_PART:
            self.pop_all()  # the step before ends here, with what was done after its update
            self.push(STEP)
        else:
            self.pop()
        self.push(name)


def merged_trace(
    ranges: Sequence[Sequence[Range]], hosts: Sequence[str], timeline: Iterable[dict[str, Any]] = ()
) -> str:
    """Return the ranges of all ranks, and the messages of Horovod's timeline in them, as one trace.

    Its format is Chrome's: chrome://tracing and ui.perfetto.dev open it.
    """
    events: list[dict[str, Any]] = []
    for rank, (own, host) in enumerate(zip(ranges, hosts, strict=True)):
        events += [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} on {host}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
            *(
                {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": rank, "tid": 0}
                for name, start, duration in own
            ),
        ]
    first = min((each.start for own in ranges for each in own), default=0.0)
    last = max((each.start + each.duration for own in ranges for each in own), default=0.0)
    messages = [event for event in timeline if "ts" not in event or first <= event["ts"] <= last]
    if any("ts" in event for event in messages):
        events += [_message_event(event, len(ranges)) for event in messages]
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


def _message_event(event: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return an event of Horovod's timeline, whose processes are messages, with a number after the ranks'."""
    name = event.get("args", {}).get("name", "")
    args = {"args": {"name": f"Horovod: {name}"}} if event.get("name") == "process_name" else {}
    return {**event, **args, "pid": ranks + event["pid"]}


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds of a step of one rank, and of its parts."""

    step: float
    own_part: float  # forward and backward, without waiting for data
    data: float
    exchange: float  # that was not hidden behind backward
    update: float

    @property
    def other(self) -> float:
        """Return the seconds of a step between the end of its update and the next one."""
        return max(0.0, self.step - self.own_part - self.data - self.exchange - self.update)


def times_of(ranges: Sequence[Range], waited_seconds: float) -> RankTimes:
    """Return the times of a rank, given how long it waited for data in all of its steps."""
    steps = sum(each.name == STEP for each in ranges)
    data = waited_seconds / steps
    step, own, exchange, update = (
        sum(each.duration / 1e6 for each in ranges if each.name == name) / steps
        for name in (STEP, OWN_PART, EXCHANGE, UPDATE)
    )
    return RankTimes(step, max(0.0, own - data), data, exchange, update)


def describe(
    steps: range,
    times: Sequence[RankTimes],
    hosts: Sequence[str],
    operators: Mapping[str, float],
    *,
    on_gpu: bool,
) -> str:
    """Return the paragraph, given the times of all ranks and the seconds of operators on rank 0."""
    first = times[0]
    shares = {
        "forward and backward": first.own_part,
        "waiting for data": first.data,
        "the exchange that was not hidden": first.exchange,
        "the update": first.update,
        "the rest, such as logs and checkpoints": first.other,
    }
    parts = ", ".join(f"{100 * seconds / first.step:.0f} % {name}" for name, seconds in shares.items())
    text = f"A step took {1e3 * first.step:.1f} ms on rank 0 (steps {steps[0]} to {steps[-1]}): {parts}."
    own = [each.own_part + each.data for each in times]
    if len(times) > 1:
        slowest = own.index(max(own))
        text += (
            f" The slowest rank is {slowest} on {hosts[slowest]}: {1e3 * own[slowest]:.1f} ms for its own "
            f"part, the fastest takes {1e3 * min(own):.1f} ms."
        )
    if total := sum(operators.values()):
        most = sorted(operators, key=lambda name: -operators[name])[:_MOST_SHOWN]
        shown = ", ".join(f"{name} {100 * operators[name] / total:.0f} %" for name in most)
        text += f" Of the {'GPU' if on_gpu else 'CPU'} time of operators: {shown}."
    # What exceeds most what it may take of a step is to be changed first, else the arithmetic.
    excess = {
        "data": first.data / first.step / 0.1,
        "straggler": (max(own) / sorted(own)[len(own) // 2] - 1) / 0.2,
        "exchange": first.exchange / first.step / 0.15,
        "update": first.update / first.step / 0.15,
        "arithmetic on a GPU" if on_gpu else "arithmetic": 1.0,
    }
    if excess["straggler"] > 1:
        excess["exchange"] = 0.0  # it contains the wait for the slowest rank
    return f"{text} To change first: {_ADVICE[max(excess, key=lambda name: excess[name])]}"


class StepProfiler(Callback):
    """Profiles the given steps, or those of them that the run takes."""

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self._profiler: profile | None = None
        self._undo = ExitStack()

    def close(self, run: TrainContext) -> None:  # noqa: ARG002
        """Stop to record, and drop what was recorded: the process may go on without this run."""
        if self._profiler is not None:
            self._stop(self._profiler)

    def started(self, run: TrainContext) -> None:
        self._begin_before(run)

    def step_done(self, run: TrainContext) -> None:
        if self._profiler is not None and run.state.step == self._steps[-1]:
            self._end(run)
        self._begin_before(run)

    def ended(self, run: TrainContext, *, finished: bool) -> None:  # noqa: ARG002
        if self._profiler is not None:  # the run has fewer steps
            self._end(run)

    def _begin_before(self, run: TrainContext) -> None:
        """Begin to record if the next step is the first one."""
        if run.state.step + 1 != self._steps[0]:
            return
        self.close(run)  # the run has gone back to a checkpoint before them
        on_gpu = run.resources.device.type == "cuda"
        self._recorder = RangeRecorder(run.resources.device)
        names = {module: name for name, module in run.state.model.named_modules()}
        recorder = self._recorder
        for block in find_blocks(run.state.model):
            shown = f"{names[block]} {type(block).__name__}"
            begin = block.register_forward_pre_hook(lambda *_, shown=shown: recorder.push(shown))
            end = block.register_forward_hook(lambda *_: recorder.pop(), always_call=True)
            self._undo.callback(begin.remove)
            self._undo.callback(end.remove)
        timer = run.progress.timer
        timer.on_phase = self._recorder.begin_phase
        self._undo.callback(setattr, timer, "on_phase", ignore)
        self._waited_before = run.learner.train_loader.waited_seconds
        self._profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
        self._profiler.start()

    def _end(self, run: TrainContext) -> None:
        """Write the traces, and log the paragraph. Collective."""
        assert self._profiler is not None
        profiler = self._profiler
        self._stop(profiler)
        taken = range(self._steps[0], run.state.step + 1)
        if not taken:
            return
        times = times_of(self._recorder.ranges, run.learner.train_loader.waited_seconds - self._waited_before)
        gathered = run.world.allgather_object((times, self._recorder.ranges))
        if not run.world.is_rank_zero:
            return
        on_gpu = run.resources.device.type == "cuda"
        all_times, all_ranges = zip(*gathered, strict=True)
        text = describe(taken, all_times, run.hosts, _operators(profiler, on_gpu=on_gpu), on_gpu=on_gpu)
        folder = run.folder / FOLDER / f"steps_{taken[0]}-{taken[-1]}"
        timeline = Path(os.environ.get("HOROVOD_TIMELINE", ""))  # of all ranks, written by rank 0
        events = read_timeline(timeline.read_text(encoding="utf-8")) if timeline.is_file() else []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / "rank0.json.gz"))
            with atomic_write(folder / "ranks.json.gz") as file:
                file.write(gzip.compress(merged_trace(all_ranges, run.hosts, events).encode()))
            with atomic_write(folder / "summary.txt") as file:
                file.write(f"{text}\n".encode())
            where = f"profile: traces in {folder} (open them at ui.perfetto.dev)"
        except OSError as error:
            where = f"warning: the profile cannot be written to {folder}: {error.strerror}"
        run.logger.log(f"profile: {text}", where)

    def _stop(self, profiler: profile) -> None:
        self._profiler = None
        self._recorder.pop_all()
        profiler.stop()
        self._undo.close()


def _operators(profiler: profile, *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of each operator, without those of the operators that it calls."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        seconds: Any = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if not event.is_user_annotation and seconds:
            found[event.key] = found.get(event.key, 0.0) + seconds / 1e6
    return found


PROFILERS.register("steps", StepProfiler)
