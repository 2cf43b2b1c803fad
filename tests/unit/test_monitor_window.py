"""Sums between two log points: exact, begun anew, and taken without holding on to the graph."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor

from horovod_volo.monitor.meters import LossMeter

CPU = torch.device("cpu")


class Waiting:
    """Seconds waited for data since the beginning of the run."""

    seconds = 10.0

    def __call__(self) -> float:
        return self.seconds


def window() -> LossMeter:
    return LossMeter(("total", "class_loss"), CPU, Waiting())


def test_values_are_summed_by_name() -> None:
    found = window()
    found.add((torch.tensor(1.5), torch.tensor(0.25)))
    found.add((torch.tensor(2.0), torch.tensor(0.5)))
    assert found.sums() == {"total": 3.5, "class_loss": 0.75}
    assert found.passes == 2


def test_many_small_values_are_not_lost_beside_a_large_one() -> None:
    found = window()
    found.add((torch.tensor(2.0**24), torch.tensor(0.0)))
    for _ in range(100):
        found.add((torch.tensor(0.25), torch.tensor(0.0)))
    assert found.sums()["total"] == 2.0**24 + 25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_any_precision(dtype: torch.dtype) -> None:
    found = window()
    for _ in range(3):
        found.add((torch.tensor(0.5, dtype=dtype), torch.tensor(60000.0, dtype=dtype)))
    assert found.sums() == {"total": 1.5, "class_loss": 3 * float(torch.tensor(60000.0, dtype=dtype))}


def test_what_is_not_finite_shows() -> None:
    found = window()
    found.add((torch.tensor(float("nan")), torch.tensor(float("inf"))))
    found.add((torch.tensor(1.0), torch.tensor(1.0)))
    assert str(found.sums()) == "{'total': nan, 'class_loss': inf}"


def test_opening_begins_anew() -> None:
    found = window()
    found.add((torch.tensor(float("nan")), torch.tensor(1.0)))
    found.open()
    assert found.sums() == {"total": 0.0, "class_loss": 0.0}
    assert found.passes == 0
    found.add((torch.tensor(1.0), torch.tensor(2.0)))
    assert found.sums() == {"total": 1.0, "class_loss": 2.0}


class Saved:
    """What autograd keeps of a forward pass for its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_adding_does_not_keep_the_graph() -> None:
    kept: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = torch.full((), 2.0, requires_grad=True).square()
    found = window()
    found.add((loss, loss))
    assert len(kept) == 1
    assert kept[0]() is not None
    del loss
    gc.collect()
    assert kept[0]() is None
    assert found.sums()["total"] == 4.0


def test_time_and_waiting_count_from_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = Waiting()
    found = LossMeter(("total",), CPU, waiting)
    assert (found.seconds, found.waited) == (0.0, 0.0)
    now[0] += 4
    waiting.seconds += 1.5
    assert (found.seconds, found.waited) == (4.0, 1.5)
    found.open()
    assert (found.seconds, found.waited) == (0.0, 0.0)
