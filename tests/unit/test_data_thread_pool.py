"""Pools of threads process every item of a batch once, whoever does it."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from horovod_volo.data.prefetcher import ImageThreadPool


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
