"""A pool of threads that process the images of a batch in parallel, each with torch limited to one thread.

Several images at a time fill the cores better than several threads for each image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from time import perf_counter
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
# Reading an image that is cached takes 0.1 ms, mostly in Python: several threads would wait for its lock.
READING_ALONE_SECONDS = 0.005


class ImageThreadPool:
    """A fixed number of threads, all started by the constructor."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._is_quick = True  # whether the last batch took about as long as the caller works alone
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        all_started = Barrier(threads)

        def start() -> None:
            torch.set_num_threads(1)
            torch.get_num_threads()  # the setting takes effect for a thread when it first reads it
            all_started.wait()

        before = torch.get_num_threads()
        wait([self._pool.submit(start) for _ in range(threads)])
        torch.set_num_threads(before)  # OpenMP has a setting for each thread, but MKL one for all

    def map(
        self, function: Callable[[Item], Result], batch: Sequence[Item], alone_seconds: float = 0.0
    ) -> list[Result]:
        """Apply a function to each item; an exception is raised after all threads have stopped.

        Before the threads start, the caller works alone for `alone_seconds`, unless the last batch was slow.
        """
        positions = iter(range(len(batch)))  # shared: each thread takes the next one

        def work() -> list[tuple[int, Result]]:
            return [(position, function(batch[position])) for position in positions]

        results, began = dict[int, Result](), perf_counter()
        deadline = began + alone_seconds * self._is_quick
        while perf_counter() < deadline and (position := next(positions, None)) is not None:
            results[position] = function(batch[position])
        workers = [self._pool.submit(work) for _ in range(min(self._threads, len(batch) - len(results)))]
        wait(workers)
        for worker in workers:
            results.update(worker.result())
        self._is_quick = perf_counter() - began < 2 * alone_seconds
        return [results[position] for position in range(len(batch))]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
