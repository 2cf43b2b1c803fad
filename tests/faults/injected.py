"""Injects one fault into a training run: `--plugin tests.faults.injected`, INJECTED_FAULT=RANK:STEP:FAULT.

The rank meets the fault when it asks for the batch after STEP steps of the run's first epoch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.data.loader import TrainLoader


def _lock_interpreter() -> None:
    """Wait for ever for a mutex, without releasing Python's lock."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


_FAULTS = {
    "lock": _lock_interpreter,
    "sleep": lambda: time.sleep(600),
    **{
        name: lambda name=name: os.kill(os.getpid(), signal.Signals[name])
        for name in signal.Signals.__members__
    },
}

_rank, _step, _fault = os.environ["INJECTED_FAULT"].split(":")
_batches = TrainLoader.batches


def _faulty(self: TrainLoader, epoch: int, first_step: int) -> Iterator[Any]:
    for step, batch in enumerate(_batches(self, epoch, first_step), start=first_step):
        if (read_launch_env().rank, epoch, step) == (int(_rank), 0, int(_step)):
            _FAULTS[_fault]()
        yield batch


if _batches.__module__ != __name__:
    TrainLoader.batches = _faulty  # type: ignore[method-assign]
