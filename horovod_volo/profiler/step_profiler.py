"""`--profile`: records some steps of all ranks, and writes traces and a paragraph on where the time went.

All ranks record, so that none becomes slower than the others; rank 0 and the slowest one write their traces.
A phase is measured on the host. On a GPU it is the time in which the kernels were launched; the names reach
Nsight Systems as NVTX ranges, which have the kernels' own times below them.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from horovod_volo.engine.callbacks import PROFILERS, Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.compiled import find_blocks
from horovod_volo.monitor.meters import EXCHANGE, OWN_PART, UPDATE

DATA, SLOWEST, REST = "waiting for data", "slowest rank", "logs, checkpoints and the rest"
# What takes more of a step than this is to be changed; the last two are arithmetic, which is to take all.
_ADVICE = {
    DATA: (0.1, "reading: more cores or --workers, packed and smaller images (pack --resize), lighter --aa"),
    SLOWEST: (0.2, "the slowest rank, for which all wait: look at its host with horovod-volo doctor"),
    EXCHANGE: (0.15, "the exchange: larger --batch-size or --accumulation, --compression fp16, the network"),
    UPDATE: (0.15, "the update: a larger --batch-size makes it rarer, --shard-optimizer divides it"),
    "CPU": (1.0, "arithmetic: this is a CPU. A smaller --img-size or --model is faster, and so is a GPU"),
    "GPU": (1.0, "arithmetic: --precision bf16 and --compile, then a larger --batch-size"),
}

Times = Mapping[str, float]  # mean seconds of a step of one rank, by part


def slowest_of(times: Sequence[Times]) -> tuple[int, list[float]]:
    """Return the slowest rank, and each rank's seconds of its own part of a step."""
    own = [each[OWN_PART] + each[DATA] for each in times]
    return own.index(max(own)), own


def describe(
    steps: range, times: Sequence[Times], hosts: Sequence[str], operators: Counter[str], device: str
) -> str:
    """Return the paragraph, given the times of all ranks and this rank's microseconds in operators."""
    step, (slowest, own) = sum(times[0].values()), slowest_of(times)
    parts = {name: seconds / step for name, seconds in times[0].items()}
    shown = ", ".join(f"{100 * part:.0f} % {name}" for name, part in parts.items())
    text = f"A step took {1e3 * step:.1f} ms on rank 0 (steps {steps[0]} to {steps[-1]}): {shown}."
    parts |= {SLOWEST: max(own) / sorted(own)[len(own) // 2] - 1, device: 1.0}
    if len(times) > 1:
        text += (
            f" The slowest rank is {slowest} on {hosts[slowest]}: {1e3 * own[slowest]:.1f} ms for its own "
            f"part, the fastest takes {1e3 * min(own):.1f} ms."
        )
    if total := operators.total():
        shown = ", ".join(f"{name} {100 * taken / total:.0f} %" for name, taken in operators.most_common(5))
        text += f" Of the {device} time of operators: {shown}."
    if parts[SLOWEST] > _ADVICE[SLOWEST][0]:
        parts[EXCHANGE] = 0.0  # it contains the wait for the slowest rank
    first = max(parts.keys() & _ADVICE, key=lambda name: parts[name] / _ADVICE[name][0])
    return f"{text} To change first: {_ADVICE[first][1]}."


class StepProfiler(Callback):
    """Profiles the given steps, or those of them that the run takes."""

    def __init__(self, steps: range) -> None:
        self._steps, self._recording = steps, ExitStack()
        self._profiler: profile | None = None

    def close(self, run: TrainContext) -> None:  # noqa: ARG002
        self._recording.close()  # the process may go on without this run
        self._profiler = None

    def started(self, run: TrainContext) -> None:
        self.step_done(run)

    def step_done(self, run: TrainContext) -> None:
        if run.state.step == self._steps[-1]:
            self._report(run)
        if run.state.step + 1 == self._steps[0]:
            self.close(run)  # the run may have gone back to a checkpoint before these steps
            self._begin(run)

    def ended(self, run: TrainContext, *, finished: bool) -> None:  # noqa: ARG002
        self._report(run)  # the run may have fewer steps

    def _begin(self, run: TrainContext) -> None:
        self._device = "GPU" if run.resources.device.type == "cuda" else "CPU"
        timer, undo = run.progress.timer, self._recording
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (self._device == "GPU")]
        self._profiler = undo.enter_context(profile(activities=activities))
        phase, in_block = (undo.enter_context(ExitStack()) for _ in range(2))
        names = {module: name for name, module in run.state.model.named_modules()}
        for block in find_blocks(run.state.model):
            begin = partial(self._show, in_block, f"{names[block]} {type(block).__name__}")
            undo.callback(block.register_forward_pre_hook(begin).remove)
            end = block.register_forward_hook(lambda *_: in_block.close(), always_call=True)
            undo.callback(end.remove)
        undo.callback(setattr, timer, "on_phase", timer.on_phase)
        timer.on_phase = partial(self._show, phase)
        self._began, self._waited = 0.0, run.learner.train_loader.waited_seconds

    def _show(self, place: ExitStack, name: str, *_: object) -> None:
        """End the range that is open in this place, and begin another one; the first one begins the time."""
        self._began = self._began or time.perf_counter()
        place.close()
        place.enter_context(record_function(name))
        if self._device == "GPU":
            place.enter_context(torch.cuda.nvtx.range(name))

    def _report(self, run: TrainContext) -> None:
        """Write the traces, and log the paragraph, if steps were recorded. Collective."""
        profiler, taken = self._profiler, range(self._steps[0], run.state.step + 1)
        if profiler is None or not taken:
            return
        seconds = time.perf_counter() - self._began
        data = (run.learner.train_loader.waited_seconds - self._waited) / len(taken)
        self.close(run)
        spent, operators = Counter[str](), Counter[str]()
        attribute = "self_cpu_time_total" if self._device == "CPU" else "self_device_time_total"
        for event in profiler.key_averages():
            if event.is_user_annotation:
                spent[event.key] += event.cpu_time_total
            elif event.device_type == DeviceType.CPU:  # it has the time of its kernels
                operators[event.key] += getattr(event, attribute)
        forward, exchange, update = (spent[part] / 1e6 / len(taken) for part in (OWN_PART, EXCHANGE, UPDATE))
        times = {OWN_PART: max(0.0, forward - data), DATA: data, EXCHANGE: exchange, UPDATE: update}
        times[REST] = max(0.0, seconds / len(taken) - sum(times.values()))
        all_times = run.world.allgather_object(times)
        folder = run.folder / "profile" / f"steps_{taken[0]}-{taken[-1]}"
        text = describe(taken, all_times, run.hosts, operators, self._device)
        where = f"profile: traces in {folder} (open them at ui.perfetto.dev)"
        try:
            if run.world.rank in (0, slowest_of(all_times)[0]):
                folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(folder / f"rank{run.world.rank}.json.gz"))
        except OSError as error:
            where = f"warning: the profile cannot be written to {folder}: {error.strerror}"
        run.logger.log(f"profile: {text}", where)
        run.logger.write_file(f"profile/{folder.name}/summary.txt", f"{text}\n")


PROFILERS.register("steps", StepProfiler)
