"""Which thread reads the batches: the consumer reads those that are cached, on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from horovod_volo.data.prefetcher import BatchPrefetcher, PendingBatch

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
