"""Gradients exchanged in two layouts, in turns, by the same ranks: a parameter server, and Horovod's ring.

The server is at its best: gradients come in pieces, and a piece's weights go out while the next pieces come
in, so both directions of its link are busy at once. torch's gather and broadcast are tried too: the faster is
the peer. Ranks meet by gloo, without a launcher: those who start them set the variables `meet` reads.
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

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.pairs import alternate
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.world import World

_MIB = 2**20
_PIECE = 16 * 1024  # elements of fp32: smaller ones cost more than they hide
_LEARNING_RATE = 0.5
_TRIALS = 2
Exchange = Callable[[Tensor], None]  # of a gradient: it changes the weights


class ParameterServer:
    """Rank 0 adds up gradients, updates the weights and sends them back. Each method is a collective."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._workers = range(1, self._size)
        self._arrivals = [torch.empty_like(weights) for _ in self._workers] if self._rank == 0 else []

    def in_pieces(self, gradient: Tensor) -> None:
        """Update piece by piece, both directions of the server's link busy at once."""
        if self._rank == 0:
            self._serve_pieces(gradient)
            return
        waits: list[Wait] = []
        for number, (ours, weights) in enumerate(zip(_pieces(gradient), _pieces(self.weights), strict=True)):
            waits += [_sent(ours, 0, tag=2 * number), _received(weights, 0, tag=2 * number + 1)]
        for wait in waits:
            wait()

    def _serve_pieces(self, gradient: Tensor) -> None:
        pieces = list(zip(*(_pieces(arrival) for arrival in self._arrivals), strict=True))
        due = [
            [
                _received(piece, worker, tag=2 * number)
                for worker, piece in zip(self._workers, row, strict=True)
            ]
            for number, row in enumerate(pieces)
        ]
        sends = []
        rows = zip(pieces, due, _pieces(gradient), _pieces(self.weights), strict=True)
        for number, (row, waits, own, weights) in enumerate(rows):
            for wait in waits:
                wait()
            self._update(weights, own, row)
            sends += [_sent(weights, worker, tag=2 * number + 1) for worker in self._workers]
        for wait in sends:
            wait()

    def gathered(self, gradient: Tensor) -> None:
        """Update by torch's gather and broadcast, one after the other."""
        everyone = [torch.empty_like(gradient), *self._arrivals] if self._rank == 0 else None
        dist.gather(gradient, everyone, dst=0)
        if self._rank == 0:
            self._update(self.weights, gradient, self._arrivals)
        dist.broadcast(self.weights, src=0)

    def _update(self, weights: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
        total = own.clone()
        for other in others:
            total.add_(other)
        weights.add_(total, alpha=-_LEARNING_RATE / self._size)


@contextmanager
def meet(hosts: str) -> Iterator[World]:
    """Meet the other ranks twice, for the peer and for Horovod. Collective: every rank calls this.

    The environment has torch's variables for a rank and Horovod's but the rendezvous; `hosts` is as Horovod
    writes them, "NAME:RANKS,...".
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
    dist.barrier()  # rank 0 keeps the store of both until all have left Horovod
    dist.destroy_process_group()


def measure_layouts(world: World, size: int, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of both layouts, pair by pair. Collective: every rank calls this."""
    gradient = _gradient(world, size)
    server, ring = ParameterServer(torch.zeros_like(gradient)), RingUpdate(world, size)
    ways = (server.in_pieces, server.gathered)
    for exchange in (*ways, ring, ring):
        exchange(gradient)
    assert_agree(f"weights after 2 updates of {size} bytes", ring.weights, server.weights, 1e-5)
    peer = min(ways, key=lambda way: sum(_together(way, gradient)() for _ in range(_TRIALS)))
    found = alternate(_together(ring, gradient), _together(peer, gradient), pairs)
    return {"ring": list(found.ours), "server": list(found.peer)}


def measure_ring(world: World, size: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of the ring alone. Collective: every rank calls this."""
    gradient = _gradient(world, size)
    block = _together(RingUpdate(world, size), gradient)
    block()
    return {"ring": [block() for _ in range(repeats)]}


class RingUpdate:
    """Horovod's ring adds up gradients, and every rank updates its weights."""

    def __init__(self, world: World, size: int) -> None:
        self.weights = torch.zeros(size // 4)
        self._travelling = torch.empty_like(self.weights)
        self._world, self._name = world, f"gradient.{size}"

    def __call__(self, gradient: Tensor) -> None:
        self._travelling.copy_(gradient)
        self._world.collectives.allreduce_async(self._travelling, self._name, 1.0 / self._world.size)()
        self.weights.add_(self._travelling, alpha=-_LEARNING_RATE)


def _gradient(world: World, size: int) -> Tensor:
    return torch.randn(size // 4, generator=torch.Generator().manual_seed(world.rank))


def measure_replay(world: World, messages: Sequence[tuple[float, int]], repeats: int) -> list[float]:
    """Return the seconds of a backward that is slept through, its messages sent when they are due.

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

    block = _together(backward, buckets[0])
    block()
    return [block() for _ in range(repeats)]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = tensor.split(_PIECE)  # type: ignore[no-untyped-call]
    return pieces


def _sent(tensor: Tensor, to: int, tag: int) -> Wait:
    return _end_of(dist.isend(tensor, to, tag=tag))


def _received(tensor: Tensor, source: int, tag: int) -> Wait:
    return _end_of(dist.irecv(tensor, source, tag=tag))


def _end_of(work: dist.Work | None) -> Wait:
    assert work is not None  # it is for ranks outside of a group, and here is no group

    def wait() -> None:
        work.wait()

    return wait


def _together(exchange: Exchange, gradient: Tensor) -> Callable[[], float]:
    """Make a block that all ranks begin together and that takes as long as the last of them."""

    def block() -> float:
        dist.barrier()
        began = perf_counter()
        exchange(gradient)
        seconds = torch.tensor(perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return block
