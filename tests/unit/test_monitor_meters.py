"""The loss meter: exact sums, a reset, and no reference to the autograd graph."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor

from horovod_volo.monitor.meters import LossMeter

CPU = torch.device("cpu")


class WaitedSeconds:
    """Returns the seconds waited for data since the start of the run."""

    seconds = 10.0

    def __call__(self) -> float:
        return self.seconds


def meter() -> LossMeter:
    return LossMeter(("total", "class_loss"), CPU, WaitedSeconds())


def test_values_are_summed_by_name() -> None:
    losses = meter()
    losses.add((torch.tensor(1.5), torch.tensor(0.25)))
    losses.add((torch.tensor(2.0), torch.tensor(0.5)))
    assert losses.sums() == {"total": 3.5, "class_loss": 0.75, "finite": 2.0}
    assert losses.micro_batches == 2


def test_many_small_values_are_not_lost_beside_a_large_one() -> None:
    losses = meter()
    losses.add((torch.tensor(2.0**24), torch.tensor(0.0)))
    for _ in range(100):
        losses.add((torch.tensor(0.25), torch.tensor(0.0)))
    assert losses.sums()["total"] == 2.0**24 + 25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_of_any_precision(dtype: torch.dtype) -> None:
    losses = meter()
    for _ in range(3):
        losses.add((torch.tensor(0.5, dtype=dtype), torch.tensor(60000.0, dtype=dtype)))
    class_loss = 3 * float(torch.tensor(60000.0, dtype=dtype))
    assert losses.sums() == {"total": 1.5, "class_loss": class_loss, "finite": 3.0}


@pytest.mark.parametrize("values", [("nan", "inf"), ("nan", "1"), ("1", "-inf")])
def test_micro_batches_that_are_not_finite_are_not_in_the_sums(values: tuple[str, str]) -> None:
    losses = meter()
    losses.add(tuple(torch.tensor(float(value)) for value in values))
    losses.add((torch.tensor(1.0), torch.tensor(2.0)))
    assert losses.sums() == {"total": 1.0, "class_loss": 2.0, "finite": 1.0}
    assert losses.micro_batches == 2


def test_reset_sets_the_sums_to_zero() -> None:
    losses = meter()
    losses.add((torch.tensor(float("nan")), torch.tensor(1.0)))
    losses.reset()
    assert losses.sums() == {"total": 0.0, "class_loss": 0.0, "finite": 0.0}
    assert losses.micro_batches == 0
    losses.add((torch.tensor(1.0), torch.tensor(2.0)))
    assert losses.sums() == {"total": 1.0, "class_loss": 2.0, "finite": 1.0}


class SavedTensor:
    """A tensor that autograd saves for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_adding_does_not_keep_the_graph_alive() -> None:
    saved_tensors: list[weakref.ref[SavedTensor]] = []

    def pack(tensor: Tensor) -> SavedTensor:
        saved = SavedTensor(tensor)
        saved_tensors.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = torch.full((), 2.0, requires_grad=True).square()
    losses = meter()
    losses.add((loss, loss))
    assert len(saved_tensors) == 1
    assert saved_tensors[0]() is not None
    del loss
    gc.collect()
    assert saved_tensors[0]() is None
    assert losses.sums()["total"] == 4.0


def test_timers_count_from_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = WaitedSeconds()
    losses = LossMeter(("total",), CPU, waiting)
    assert (losses.seconds, losses.data_wait_seconds) == (0.0, 0.0)
    now[0] += 4
    waiting.seconds += 1.5
    assert (losses.seconds, losses.data_wait_seconds) == (4.0, 1.5)
    losses.reset()
    assert (losses.seconds, losses.data_wait_seconds) == (0.0, 0.0)
