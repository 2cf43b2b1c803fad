"""Collectives that complete late, in any order and on another thread, give the same gradients.

Horovod completes messages in the order that the ranks agree on, and may read and write a tensor at any time
between the launch and the wait. The stand-in here does both as late as possible, in random order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Collectives, Wait, WaitForResult
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from tests.unit.test_cluster_reducer_alone import SmallNetwork, loss

RANKS, STEPS = 2, 4
Operation = Callable[[], None]


class EqualRanks(Collectives):
    """The collectives of ranks that all have the values of this one."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        wait = self.launch(lambda: self._sum(tensor, scale))
        return lambda: self._result(wait, tensor)

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:
        part = torch.full_like(tensor[: len(tensor) // RANKS], torch.nan)
        wait = self.launch(lambda: self._copy(part, RANKS * tensor[: len(part)]))
        return lambda: self._result(wait, part)

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:
        result = torch.full_like(part.repeat(RANKS), torch.nan)
        wait = self.launch(lambda: self._copy(result, part.repeat(RANKS)))
        return lambda: self._result(wait, result)

    def launch(self, operation: Operation) -> Wait:
        """Run the operation at once."""
        operation()
        return lambda: None

    @staticmethod
    def _sum(tensor: Tensor, scale: float) -> None:
        tensor.mul_(RANKS * scale)

    @staticmethod
    def _copy(target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    @staticmethod
    def _result(wait: Wait, result: Tensor) -> Tensor:
        wait()
        return result


class LateCollectives(EqualRanks):
    """Run the operations on another thread when the host first waits, in random order."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._random = random.Random(0)
        self._pending: list[tuple[Operation, threading.Event]] = []
        self.most_pending = 0

    def launch(self, operation: Operation) -> Wait:
        """Keep the operation until a wait."""
        done = threading.Event()
        self._pending.append((operation, done))
        self.most_pending = max(self.most_pending, len(self._pending))

        def wait() -> None:
            self._random.shuffle(self._pending)
            for pending, finished in self._pending:
                self._thread.submit(self._run, pending, finished)
            self._pending.clear()
            assert done.wait(timeout=30)

        return wait

    @staticmethod
    def _run(operation: Operation, done: threading.Event) -> None:
        with torch.no_grad():
            operation()
        done.set()


@pytest.fixture
def late() -> Iterator[LateCollectives]:
    with ThreadPoolExecutor(1) as thread:
        yield LateCollectives(thread)


def gradients_of_steps(
    collectives: EqualRanks, kind: type[Reducer], compression: Literal["none", "fp16"], micro_batches: int
) -> list[Tensor]:
    """Train a few steps of gradient descent; return the local gradients of each, and the last statistics."""
    model = SmallNetwork()
    settings = Exchange(compression=compression, bucket_mib=300 / 2**20)
    world = World(rank=0, size=RANKS, collectives=collectives)
    reducer = kind(model, world, settings, micro_batches=micro_batches)
    found = []
    for step in range(STEPS):
        for number in range(micro_batches):
            loss(model, 10 * step + number).backward()  # type: ignore[no-untyped-call]
        with reducer.synchronized_gradients(), torch.no_grad():
            found += [gradient.clone() for gradient in reducer.local_gradients]
            for parameter in reducer.local_parameters.values():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("kind", [Reducer, ShardedReducer])
def test_late_completions_in_any_order_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
    late: LateCollectives,
    kind: type[Reducer],
    compression: Literal["none", "fp16"],
    micro_batches: int,
    as_on_gpu: bool,
) -> None:
    expected = gradients_of_steps(EqualRanks(), kind, compression, micro_batches)
    if as_on_gpu:  # gradients are copied at once
        monkeypatch.setattr("horovod_volo.cluster.reducer._on_cpu", lambda _: False)
    found = gradients_of_steps(late, kind, compression, micro_batches)
    assert late.most_pending > 2
    assert all(tensor.isfinite().all() for tensor in found)
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours, right)
