"""Injects faults into a training run: `--plugin tests.faults.injected`, INJECTED_FAULT=RANK:STEPS:FAULT.

The rank meets the fault when it asks for a batch after so many steps of the run. STEPS is a number, a
first and a last one, as 3-5, or several of these, as 0,4. Several faults are separated by spaces.
Those of _FROM_THE_START do not depend on STEPS. With CONSUMED=FOLDER in the environment, the images of each
step are recorded before its fault, in one file for each rank and start.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.step_statistics import StepStatistics
from horovod_volo.data.images import catalog
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import TrainLoader
from horovod_volo.monitor.run_logger import RunLogger

_batches, _read, _close, _initialize = TrainLoader.batches, Catalog.read, RunLogger.close, Reducer.__init__
_reducers: list[Reducer] = []
_FILE = f"{time.time_ns()}_{read_launch_env().rank}.jsonl"


def _lock_interpreter() -> None:
    """Wait for ever for a mutex, without releasing Python's lock."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _raise() -> None:
    raise RuntimeError("injected")


def _pause() -> None:
    """Be stopped by a signal, and go on two seconds later."""
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _flip() -> None:
    """Flip a bit of the largest weight, once: a weight of 0 would lose it in the next step."""
    if _reducers:
        weights = _reducers.pop().buckets[0].weights
        weights.view(torch.int32)[weights.abs().argmax()] ^= 1 << 20


def _spoil_gradient(dimensions: int, number: float) -> None:
    """Make one element of the next gradient of a matrix or a vector not finite; the loss stays as it is."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        spoilt = gradient.clone()
        spoilt[(0,) * dimensions] = number
        return spoilt

    parameters = (each for bucket in _reducers[0].buckets for each in bucket.parameters.values())
    handle = next(each for each in parameters if each.dim() == dimensions).register_hook(spoil)


_AT_STEPS = {
    "lock": lambda _: _lock_interpreter(),
    "exit": lambda _: sys.exit(3),
    "raise": lambda _: _raise(),
    "pause": lambda _: _pause(),
    "nan": lambda batch: batch.images.fill_(math.nan),
    "flip": lambda _: _flip(),
    "inf-matrix": lambda _: _spoil_gradient(2, math.inf),
    "nan-vector": lambda _: _spoil_gradient(1, math.nan),
    **{
        name: lambda _, name=name: os.kill(os.getpid(), signal.Signals[name])
        for name in signal.Signals.__members__
    },
}


def _noted(self: Reducer, *arguments: Any, **options: Any) -> None:
    _reducers.append(self)
    _initialize(self, *arguments, **options)


def _faulty(self: TrainLoader, epoch: int, first_step: int) -> Iterator[Any]:
    for step, batch in enumerate(_batches(self, epoch, first_step), start=first_step):
        if folder := os.environ.get("CONSUMED"):
            with Path(folder, _FILE).open("a") as file:
                print(json.dumps([epoch * self.steps + step, batch.indices.tolist()]), file=file)
        if fault := _own.get(epoch * self.steps + step):
            fault(batch)
        yield batch


def _slow(self: Catalog, index: int) -> Any:
    """Read an image 50 ms more slowly."""
    time.sleep(0.05)
    return _read(self, index)


def _list_for_ever(*_: Any) -> None:
    """Wait for a file of a server that does not answer: a FIFO."""
    os.mkfifo("unanswered")
    os.read(os.open("unanswered", os.O_RDONLY), 1)


def _close_slowly(self: RunLogger) -> None:
    """Close the logger as late as one that uploads."""
    time.sleep(7.0)  # horovodrun kills ranks five seconds after the first one has exited
    _close(self)


def _learn_late() -> None:
    """Let the host learn one step late what ranks agreed on, as on several GPUs."""

    def skip_on_device(statistics: StepStatistics) -> None:
        statistics.found_inf = statistics._averaged.new_zeros(())

    StepStatistics.skip_on_device = skip_on_device  # type: ignore[method-assign]
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)


def _never_leave() -> None:
    """Wait for ever in the call that ends this rank's part in others, but not before they have trained."""
    from horovod_volo.elastic import run as elastic_run

    elastic_run.leave_ranks = lambda: time.sleep(600 if _reducers else 0)


_FROM_THE_START = {
    "never-leave": _never_leave,
    "late": _learn_late,
    "import": lambda: time.sleep(600),
    "unlisted": lambda: setattr(catalog, "list_images", _list_for_ever),
    "slow-close": lambda: setattr(RunLogger, "close", _close_slowly),
    "slow": lambda: setattr(Catalog, "read", _slow),
}
_own: dict[int, Any] = {}  # the faults of this rank by step
for _rank, _steps, _fault in (each.split(":") for each in os.environ["INJECTED_FAULT"].split()):
    if read_launch_env().rank != int(_rank):
        continue
    if _fault in _FROM_THE_START:
        _FROM_THE_START[_fault]()
        continue
    for _first, _, _last in (part.partition("-") for part in _steps.split(",")):
        _own |= dict.fromkeys(range(int(_first), int(_last or _first) + 1), _AT_STEPS[_fault])
Reducer.__init__ = _noted  # type: ignore[method-assign]
TrainLoader.batches = _faulty  # type: ignore[method-assign]
