"""Threads that share the images of a batch: each takes the next image until none is left.

Each computes alone, however many threads torch has elsewhere: several images at a time fill the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")


class ImageThreadPool:
    """So many threads, started at once."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        all_started = Barrier(threads)

        def start() -> None:
            torch.set_num_threads(1)
            torch.get_num_threads()  # a thread makes the number its own where it is first asked for
            all_started.wait()

        before = torch.get_num_threads()
        wait([self._pool.submit(start) for _ in range(threads)])
        torch.set_num_threads(before)  # OpenMP keeps a number for each thread, but MKL one for all

    def map(self, work: Callable[[Given], Made], batch: Sequence[Given]) -> list[Made]:
        """Return what `work` makes of each of a batch; raise what it raises, once no thread works on."""
        left = iter(range(len(batch)))

        def take() -> list[tuple[int, Made]]:
            return [(place, work(batch[place])) for place in left]

        taking = [self._pool.submit(take) for _ in range(min(self._threads, len(batch)))]
        wait(taking)
        made = dict(pair for taken in taking for pair in taken.result())
        return [made[place] for place in range(len(batch))]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
