"""Which thread reads a batch, or processes its images: the caller where that is quick."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from horovod_volo.data.prefetcher import BatchPrefetcher, ImageThreadPool, PendingBatch

BATCHES, DEPTH = 8, 3


class Pipeline:
    """Decodes nothing."""

    def __init__(self, source: Callable[[], Any]) -> None:
        self._source = source

    def run(self, _: object = None) -> tuple[Any]:
        return (self._source(),)

    def reset(self) -> None:
        pass


def readers(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Return for each batch of epochs, whose reads take so long, whether the consumer has read it."""
    by_consumer: dict[int, bool] = {}
    clock = 0.0
    monkeypatch.setattr("horovod_volo.data.prefetcher.perf_counter", lambda: clock)

    def read(number: int, takes: float) -> PendingBatch:
        nonlocal clock
        by_consumer[number] = threading.current_thread() is threading.main_thread()
        clock += takes
        return PendingBatch(np.array([number]), ([np.zeros(1)],))

    made = BatchPrefetcher[PendingBatch](
        Pipeline, torch.device("cpu"), DEPTH, lambda _: None, lambda *_: torch.empty(0)
    )
    found = []
    with closing(made):
        for takes in seconds:
            by_consumer.clear()
            batches = made.batches(partial(read, number, takes) for number in range(BATCHES))
            assert [int(pending.indices[0]) for pending, _ in batches] == list(range(BATCHES))
            found.append([by_consumer[number] for number in range(BATCHES)])
    return found


def test_the_consumer_reads_cached_batches_and_tries_others_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = [True] * BATCHES
    slow = [True] * 6 + [False] * 2  # four in a row are slow; two more were announced by then
    assert readers([0.0, 0.02, 0.02, 0.0], monkeypatch) == [cached, slow, slow, cached]


@pytest.fixture
def pool():
    with closing(ImageThreadPool(2, "test")) as pool:
        yield pool


def test_the_caller_processes_quick_items_alone(pool) -> None:
    done_by = pool.map(lambda _: threading.get_ident(), range(50), alone_seconds=10)
    assert set(done_by) == {threading.get_ident()}


def test_threads_take_over_from_a_slow_item(pool) -> None:
    def name(item: int) -> tuple[int, int]:
        time.sleep(0.01)
        return item, threading.get_ident()

    items, done_by = zip(*pool.map(name, range(8), alone_seconds=0.001), strict=True)
    assert items == tuple(range(8))
    assert done_by[0] == threading.get_ident()
    assert threading.get_ident() not in done_by[1:]
    assert len(set(done_by[1:])) == 2
    # The next batch does not wait for its first item.
    assert threading.get_ident() not in [by for _, by in pool.map(name, range(8), alone_seconds=0.001)]
    # Quick items are processed alone again after one batch.
    pool.map(abs, range(8), alone_seconds=10)
    assert set(pool.map(lambda _: threading.get_ident(), range(8), alone_seconds=10)) == {
        threading.get_ident()
    }


def test_an_error_reaches_the_caller(pool) -> None:
    for alone_seconds in (0.0, 10.0):
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda item: 1 / item, range(3), alone_seconds)
