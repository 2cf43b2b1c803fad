"""`--profile`: records some steps of all ranks, and writes traces and a paragraph on where the time went.

All ranks record, so that none becomes slower than the others; rank 0 writes.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.engine.callbacks import PROFILERS, Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.compiled import find_blocks
from horovod_volo.monitor.meters import ignore
from horovod_volo.profiler.step_ranges import RangeRecorder, describe, merged_trace, read_timeline, times_of

FOLDER = "profile"  # in the run folder


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
        device = run.resources.device
        on_gpu = device.type == "cuda"
        self._recorder = RangeRecorder(device)
        names = {module: name for name, module in run.state.model.named_modules()}
        for block in find_blocks(run.state.model):
            self._undo.callback(_record_forward(block, names[block], self._recorder))
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
        world, device = run.world, run.resources.device
        times = times_of(self._recorder.ranges, run.learner.train_loader.waited_seconds - self._waited_before)
        gathered = world.allgather_object((times, self._recorder.ranges))
        if not world.is_rank_zero:
            return
        hosts = run.progress.stragglers.hosts if run.progress.stragglers is not None else ["this host"]
        operators = _operators(profiler, on_gpu=device.type == "cuda")
        all_times, all_ranges = zip(*gathered, strict=True)
        text = describe(taken, all_times, hosts, operators, on_gpu=device.type == "cuda")
        folder = run.folder / FOLDER / f"steps_{taken[0]}-{taken[-1]}"
        timeline = _timeline(run.config.launch.horovod_timeline)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / "rank0.json.gz"))
            with atomic_write(folder / "ranks.json.gz") as file:
                file.write(gzip.compress(merged_trace(all_ranges, hosts, timeline).encode()))
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


def _record_forward(block: nn.Module, name: str, recorder: RangeRecorder) -> Callable[[], None]:
    """Record the forward passes of a block; return what ends that."""
    shown = f"{name} {type(block).__name__}"
    handles = [
        block.register_forward_pre_hook(lambda *_: recorder.push(shown)),
        block.register_forward_hook(lambda *_: recorder.pop(), always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _operators(profiler: profile, *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of each operator, without those of the operators that it calls."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        seconds: Any = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if not event.is_user_annotation and seconds:
            found[event.key] = found.get(event.key, 0.0) + seconds / 1e6
    return found


def _timeline(file: str) -> list[dict[str, Any]]:
    """Return the events of Horovod's timeline, which only the process of rank 0 writes; none without one."""
    path = Path(file)
    return read_timeline(path.read_text(encoding="utf-8")) if file and path.is_file() else []


PROFILERS.register("steps", StepProfiler)
