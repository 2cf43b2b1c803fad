"""Calls a function on many tasks in worker processes, which end with this process however it ends."""

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from horovod_volo.core.errors import UserError
from horovod_volo.core.processes import die_with_parent

Key = TypeVar("Key")
Result = TypeVar("Result")


def run_in_processes(
    function: Callable[..., Result],
    tasks: Mapping[Key, tuple[Any, ...]],
    workers: int,
    on_result: Callable[[Key, Result], None],
) -> None:
    """Call `function` with the arguments of each task, and `on_result` in this process as each returns.

    After an error no further task starts. When this function returns or raises, no worker runs any more.
    """
    # Spawned, not forked: a forked process inherits locked mutexes of other threads.
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)) or 1, get_context("spawn"), die_with_parent, (os.getpid(),)
    )
    try:
        # Ctrl-C reaches all processes of a terminal. Workers inherit that it is blocked, and are ended here.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            futures = {pool.submit(function, *arguments): key for key, arguments in tasks.items()}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for future in as_completed(futures):
            on_result(futures[future], future.result())
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps for lack of memory. Run the same command again, with "
            "fewer --workers if it happens again: finished shards are reused."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
