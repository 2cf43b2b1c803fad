"""The same ranks exchange gradients by a parameter server and by Horovod's ring all-reduce, alternating.

The server is used at its best: gradients arrive in pieces, and the weights of a piece are sent while the next
pieces arrive, so that both directions of its link are busy. torch's gather and broadcast are tried too; the
faster of both is the peer. Ranks communicate by gloo, without a launcher, which sets the variables otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
from torch import Tensor

from horovod_volo.bench.comparison import Block, alternate, assert_agree
from horovod_volo.cluster.world import World

_PIECE = 16 * 1024  # elements of fp32: smaller pieces cost more than they hide
_LEARNING_RATE = 0.5
_TRIALS = 2
Exchange = Callable[[Tensor], None]  # of a gradient; updates the weights


@contextmanager
def join_ranks(hosts: str) -> Iterator[World]:
    """Initialise torch.distributed and Horovod on the ranks. Collective: every rank calls this.

    The environment has torch's variables of a rank and Horovod's except the rendezvous; `hosts` has Horovod's
    syntax, "NAME:RANKS,...".
    """
    dist.init_process_group("gloo", init_method="env://")
    port = [0]
    if dist.get_rank() == 0:
        server = RendezvousServer()
        port = [server.start()]
        server.init(get_host_assignments(parse_hosts(hosts), dist.get_world_size()))
    dist.broadcast_object_list(port, src=0)
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = os.environ["MASTER_ADDR"]
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port[0])
    yield World.connect()
    hvd.shutdown()
    dist.barrier()  # rank 0 serves both until all have left Horovod
    dist.destroy_process_group()


class ParameterServer:
    """Rank 0 sums gradients, updates the weights and sends them back. Each method is a collective."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._workers = range(1, self._size)
        self._received = [torch.empty_like(weights) for _ in self._workers] if self._rank == 0 else []

    def in_pieces(self, gradient: Tensor) -> None:
        """Update piece by piece, both directions of the server's link busy at the same time."""
        if self._rank == 0:
            self._serve_pieces(gradient)
            return
        work = []
        for number, (own, weights) in enumerate(zip(_pieces(gradient), _pieces(self.weights), strict=True)):
            work += [dist.isend(own, 0, tag=2 * number), dist.irecv(weights, 0, tag=2 * number + 1)]
        _wait(work)

    def _serve_pieces(self, gradient: Tensor) -> None:
        pieces = list(zip(*(_pieces(received) for received in self._received), strict=True))
        arriving = [
            [
                dist.irecv(piece, worker, tag=2 * number)
                for worker, piece in zip(self._workers, row, strict=True)
            ]
            for number, row in enumerate(pieces)
        ]
        sends = []
        rows = zip(pieces, arriving, _pieces(gradient), _pieces(self.weights), strict=True)
        for number, (row, work, own, weights) in enumerate(rows):
            _wait(work)
            self._update(weights, own, row)
            sends += [dist.isend(weights, worker, tag=2 * number + 1) for worker in self._workers]
        _wait(sends)

    def gathered(self, gradient: Tensor) -> None:
        """Update by torch's gather and broadcast, one after the other."""
        everyone = [torch.empty_like(gradient), *self._received] if self._rank == 0 else None
        dist.gather(gradient, everyone, dst=0)
        if self._rank == 0:
            self._update(self.weights, gradient, self._received)
        dist.broadcast(self.weights, src=0)

    def _update(self, weights: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
        total = own.clone()
        for other in others:
            total.add_(other)
        weights.add_(total, alpha=-_LEARNING_RATE / self._size)


class RingUpdate:
    """Horovod's ring averages gradients, and every rank updates its weights."""

    def __init__(self, world: World, size: int) -> None:
        self.weights = torch.zeros(size // 4)
        self._buffer = torch.empty_like(self.weights)
        self._world, self._name = world, f"gradient.{size}"

    def __call__(self, gradient: Tensor) -> None:
        """Update the weights. Collective: every rank calls this."""
        self._buffer.copy_(gradient)
        self._world.collectives.allreduce_async(self._buffer, self._name, 1.0 / self._world.size)()
        self.weights.add_(self._buffer, alpha=-_LEARNING_RATE)


def measure_layouts(world: World, size: int, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of both for a gradient of `size` bytes. Collective: every rank calls this."""
    gradient = _gradient(world, size)
    server, ring = ParameterServer(torch.zeros_like(gradient)), RingUpdate(world, size)
    forms = (server.in_pieces, server.gathered)
    for exchange in (*forms, ring, ring):
        exchange(gradient)
    assert_agree(f"weights after 2 updates of {size} bytes", ring.weights, server.weights, 1e-5)
    peer = min(forms, key=lambda form: sum(_block(form, gradient)() for _ in range(_TRIALS)))
    found = alternate(_block(ring, gradient), _block(peer, gradient), pairs)
    return {"ring": list(found.ours), "server": list(found.peer)}


def measure_ring(world: World, size: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of the ring alone. Collective: every rank calls this."""
    block = _block(RingUpdate(world, size), _gradient(world, size))
    block()
    return {"ring": [block() for _ in range(repeats)]}


def measure_replay(world: World, messages: Sequence[tuple[float, int]], repeats: int) -> list[float]:
    """Return the seconds of a backward that only sleeps, and sends each message when it is ready.

    Collective: every rank calls this.
    """
    buckets = [torch.zeros(size // 4) for _, size in messages]

    def backward(_gradient: Tensor) -> None:
        began = perf_counter()
        waits = []
        for number, (ready, _size) in enumerate(messages):
            time.sleep(max(0.0, began + ready - perf_counter()))
            waits.append(world.collectives.allreduce_async(buckets[number], f"replayed.{number}", 1.0))
        for wait in waits:
            wait()

    block = _block(backward, buckets[0])
    block()
    return [block() for _ in range(repeats)]


def _gradient(world: World, size: int) -> Tensor:
    return torch.randn(size // 4, generator=torch.Generator().manual_seed(world.rank))


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = tensor.split(_PIECE)  # type: ignore[no-untyped-call]
    return pieces


def _wait(work: Sequence[dist.Work | None]) -> None:
    for item in work:
        assert item is not None  # None is returned to ranks outside of a group, and there are no groups
        item.wait()


def _block(exchange: Exchange, gradient: Tensor) -> Block:
    """Make a block that all ranks begin together and whose time is the slowest rank's."""

    def block() -> float:
        dist.barrier()
        began = perf_counter()
        exchange(gradient)
        seconds = torch.tensor(perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return block
