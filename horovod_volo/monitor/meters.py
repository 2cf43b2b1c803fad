"""What a rank measures between two log points: losses, its times, and the memory in use.

Nothing here synchronises with the device before a log point reads it.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

OWN_PART, EXCHANGE, UPDATE = "forward and backward", "exchange", "update"  # the phases of a step
_LEAST_FRACTION, _LEAST_SECONDS = 0.1, 0.005  # by which a straggler is slower than the others
_GIB = 2**30

# The first pattern that is found in a GPU's name: TFLOP/s of fp16 and bf16, of TF32, and of fp32. These are
# the peaks of products of dense matrices, as NVIDIA's data sheets state them, without sparsity.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"H200 NVL|H100 NVL", {"half": 835.0, "tf32": 417.0, "fp32": 60.0}),
    (r"H100 PCIe", {"half": 756.0, "tf32": 378.0, "fp32": 51.0}),
    (r"H100|H200", {"half": 989.0, "tf32": 494.0, "fp32": 67.0}),
    (r"A100\b", {"half": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"A40\b", {"half": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"A30\b", {"half": 165.0, "tf32": 82.0, "fp32": 10.3}),
    (r"A10\b", {"half": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (r"L40S", {"half": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (r"L4\b", {"half": 121.0, "tf32": 60.0, "fp32": 30.3}),
    (r"V100-SXM2", {"fp16": 125.0, "fp32": 15.7}),
    (r"V100-PCIE", {"fp16": 112.0, "fp32": 14.0}),
    (r"T4\b", {"fp16": 65.0, "fp32": 8.1}),
    (r"RTX 4090\b(?! D)", {"half": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"RTX 3090\b(?! Ti)", {"half": 71.0, "tf32": 35.6, "fp32": 35.6}),
)


class LossMeter:
    """Sums of losses in fp64 on the device, and timers, since the last reset.

    Micro-batches with a loss that is not finite are left out; `finite` among the sums counts the others.
    `waited_seconds` returns how long the run has waited for data since it started.
    """

    def __init__(
        self, names: tuple[str, ...], device: torch.device, waited_seconds: Callable[[], float]
    ) -> None:
        self._names = (*names, "finite")
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        self._waited_seconds = waited_seconds
        self.reset()

    def reset(self) -> None:
        """Set sums and timers to zero."""
        self._sums.zero_()
        self.micro_batches = 0
        self._start_time = time.monotonic()
        self._waited_at_reset = self._waited_seconds()

    def add(self, values: Iterable[Tensor]) -> None:
        """Add the losses of one micro-batch. Does not synchronise with the device."""
        losses = torch.stack([*(value.detach() for value in values), self._one]).to(self._sums.dtype)
        self._sums += torch.where(losses.isfinite().all(), losses, 0.0)
        self.micro_batches += 1

    def sums(self) -> dict[str, float]:
        """Return the sums by name. Waits for the device."""
        return dict(zip(self._names, self._sums.tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Return the seconds since the last reset."""
        return time.monotonic() - self._start_time

    @property
    def data_wait_seconds(self) -> float:
        """Return the seconds since the last reset that were spent waiting for data."""
        return self._waited_seconds() - self._waited_at_reset


class TrainingClock:
    """The hours that a run has been trained, and the part of its time that checkpoints take.

    Hours are those of the wall clock, with evaluations and checkpoints; a run that resumes counts on from its
    last record.
    """

    def __init__(self, hours_before: float = 0.0) -> None:
        self._hours_before = hours_before
        self._start = time.monotonic()
        self._depth = 0
        self._checkpoints = 0.0  # seconds since the last log point
        self._before_epoch = 0.0  # of them, those before the epoch under way began

    @property
    def hours(self) -> float:
        """Return the hours of training since the start of the run."""
        return self._hours_before + (time.monotonic() - self._start) / 3600

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time inside as that of a checkpoint."""
        self._depth += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._checkpoints += time.monotonic() - began

    def begin_epoch(self) -> None:
        """Note that the time since the last log point, but for checkpoints, was not that of training."""
        self._before_epoch = self._checkpoints

    def take_checkpoint_seconds(self) -> tuple[float, float]:
        """Return the seconds of checkpoints since the last log point, and those before the epoch began."""
        taken = self._checkpoints, self._before_epoch
        self._checkpoints = self._before_epoch = 0.0
        return taken


class OwnTime(NamedTuple):
    """Seconds of one rank, on average over steps."""

    seconds: float = 0.0  # of its own part of a step
    data: float = 0.0  # of them, waiting for data


class StepTimer:
    """Measures a rank's own part of its steps: from their start to the end of backward on its device.

    A step calls `begin`, `end` and `exchanged`, which also call `on_phase` with the phase that begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.on_phase: Callable[[str], None] = lambda phase: None  # noqa: ARG005
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._steps, self._seconds, self._exchange_seconds = 0, 0.0, 0.0
        self._marks: list[list[torch.cuda.Event]] = []  # of each step, one for each call

    def begin(self) -> None:
        """Note that a step begins."""
        self.on_phase(OWN_PART)
        self._began = time.monotonic()
        self._marks.append([])
        self._mark()

    def end(self) -> None:
        """Note that the backward of the step, and the wait for its data, are over."""
        self._steps += 1
        self._ended = time.monotonic()
        self._seconds += self._ended - self._began
        self._mark()
        self.on_phase(EXCHANGE)

    def exchanged(self) -> None:
        """Note that the gradients of the step are averaged over ranks."""
        self._exchange_seconds += time.monotonic() - self._ended
        self._mark()
        self.on_phase(UPDATE)

    def seconds_per_step(self) -> float:
        """Return the mean time of a step, the longer of host's and device's. Waits for the device."""
        return max(self._seconds, self._device_seconds(0)) / max(self._steps, 1)

    def exchange_seconds(self) -> float:
        """Return for how long steps, on a GPU the device, waited for other ranks. Waits for the device."""
        return self._device_seconds(1) if self._is_cuda else self._exchange_seconds

    def _mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks[-1].append(event)

    def _device_seconds(self, first: int) -> float:
        """Return the time between two calls of each step on a GPU; 0 on a CPU."""
        seconds = 0.0
        for marks in self._marks:
            if len(marks) > first + 1:
                marks[first + 1].synchronize()
                seconds += marks[first].elapsed_time(marks[first + 1]) / 1e3
        return seconds


@dataclass
class StragglerFinder:
    """Names a rank that the others wait for, once: it is slower than they are at two log points in a row."""

    hosts: Sequence[str]  # by rank
    _last: int | None = None
    _named: int | None = None

    def find(self, times: Sequence[OwnTime]) -> str | None:
        """Return a message if there is a new straggler, given the times of all ranks."""
        slowest = max(range(len(times)), key=lambda rank: times[rank].seconds)
        own, typical = times[slowest], median_low(each.seconds for each in times)
        if own.seconds - typical < max(_LEAST_SECONDS, _LEAST_FRACTION * typical):
            self._last = self._named = None
            return None
        is_new = slowest == self._last and slowest != self._named
        self._last = slowest
        if not is_new:
            return None
        self._named = slowest
        return (
            f"warning: the other ranks wait for rank {slowest} on {self.hosts[slowest]}: it takes "
            f"{1e3 * own.seconds:.0f} ms for its part of a step, they take {1e3 * typical:.0f} ms; of its "
            f"time, {1e3 * own.data:.0f} ms are waiting for data"
        )


def host_memory_gib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _GIB


def device_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return what tensors use of a GPU now, and at most so far; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.memory_allocated(device) / _GIB, torch.cuda.max_memory_allocated(device) / _GIB


def peak_flops(gpu: str, precision: str) -> float:
    """Return the peak of a GPU by its name, in FLOP/s, for a value of --precision; 0: not known."""
    for pattern, peaks in _PEAKS:
        if re.search(pattern, gpu):
            kind = "half" if precision in {"fp16", "bf16"} and "half" in peaks else precision
            return 1e12 * peaks.get(kind, 0.0)
    return 0.0
