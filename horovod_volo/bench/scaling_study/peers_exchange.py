"""The same ranks exchange gradients by a parameter server and by Horovod's ring all-reduce, alternating.

`on_ranks` starts the ranks on this machine, which may be on emulated hosts. They are forked from a process
that is new for this, so that torch and Horovod are imported once and no thread of the caller is lost. They
communicate by gloo, without a launcher, which sets the variables otherwise.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from time import perf_counter
from typing import Any, TypeVar

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from horovod_volo.bench.comparison import Action, PairedTimes, TimedBlock, alternate, assert_agree
from horovod_volo.bench.network_namespaces import INTERFACE, NetworkHost
from horovod_volo.cluster.world import World

_TIMEOUT_SECONDS = 240
_PIECE = 16 * 1024  # elements of fp32: smaller pieces cost more than they hide
_LEARNING_RATE = 0.5
_TRIALS = 2
# As in the simulator's constants: Horovod's default cycle in milliseconds, and no fusion.
_HOROVOD_SETTINGS = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "0"}

T = TypeVar("T")


def on_ranks(sizes: Sequence[int], function: Callable[[World], T], hosts: Sequence[NetworkHost]) -> list[T]:
    """Return what the function returns on rank 0 of so many ranks, for each number of ranks in turn.

    Each rank is on a host of its own if there are `hosts`.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return [alone.submit(_fork_ranks, size, function, hosts[:size]).result() for size in sizes]


def _fork_ranks(size: int, function: Callable[[World], Any], hosts: Sequence[NetworkHost]) -> Any:
    receiver, sender = Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, function, hosts, f"{folder}/store", sender)
        try:
            start_processes(_rank, arguments, nprocs=size, daemon=True, start_method="fork")  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as problem:
            raise RuntimeError(f"a rank of {size} ended: {problem}") from None
    return receiver.recv()


def _rank(
    rank: int,
    size: int,
    function: Callable[[World], Any],
    hosts: Sequence[NetworkHost],
    store: str,
    sender: Connection,
) -> None:
    signal.alarm(_TIMEOUT_SECONDS)  # ends this rank, and with it the others
    os.dup2(2, 1)  # gloo prints to the standard output, which belongs to the result
    if hosts:
        hosts[rank].enter()
    torch.set_num_threads(1)
    with _joined(rank, size, hosts, store) as world:
        found = function(world)
    if rank == 0:
        sender.send(found)


@contextmanager
def _joined(rank: int, size: int, hosts: Sequence[NetworkHost], store: str) -> Iterator[World]:
    """Initialise torch.distributed and Horovod on the ranks."""
    address, interface = (hosts[0].address, INTERFACE) if hosts else ("127.0.0.1", "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    names = ",".join(f"{host.address}:1" for host in hosts) or f"localhost:{size}"
    slots = get_host_assignments(parse_hosts(names), size)
    port = [0]
    if rank == 0:
        server = RendezvousServer()
        port = [server.start()]
        server.init(slots)
    dist.broadcast_object_list(port, src=0)
    run_variables = create_run_env_vars(address, [interface], str(port[0]))
    os.environ.update(create_slot_env_vars(slots[rank]) | run_variables | _HOROVOD_SETTINGS)
    yield World.connect()
    hvd.shutdown()
    dist.barrier()  # rank 0 serves both until all have left Horovod
    dist.destroy_process_group()


class ParameterServer:
    """Rank 0 sums gradients, updates the weights and sends them back. Each method is a collective."""

    def __init__(self, gradient: Tensor) -> None:
        self.weights = torch.zeros_like(gradient)
        self._gradient = gradient
        self._is_server, self._size = dist.get_rank() == 0, dist.get_world_size()
        self._received = [torch.empty_like(gradient) for _ in range(1, self._size) if self._is_server]

    def in_pieces(self) -> None:
        """Update piece by piece, both directions of the server's link busy at the same time."""
        own = list(zip(_pieces(self._gradient), _pieces(self.weights), strict=True))
        if not self._is_server:
            work = []
            for number, (gradient, weights) in enumerate(own):
                work += [dist.isend(gradient, 0, tag=2 * number), dist.irecv(weights, 0, tag=2 * number + 1)]
            _wait(work)
            return
        received = list(zip(*map(_pieces, self._received), strict=True))
        arriving = [
            [dist.irecv(piece, worker, tag=2 * number) for worker, piece in enumerate(pieces, 1)]
            for number, pieces in enumerate(received)
        ]
        sends = []
        for number, ((gradient, weights), pieces) in enumerate(zip(own, received, strict=True)):
            _wait(arriving[number])
            self._update(weights, gradient, pieces)
            sends += [dist.isend(weights, worker, tag=2 * number + 1) for worker in range(1, self._size)]
        _wait(sends)

    def gathered(self) -> None:
        """Update by torch's gather and broadcast, one after the other."""
        everyone = [torch.empty_like(self._gradient), *self._received] if self._is_server else None
        dist.gather(self._gradient, everyone, dst=0)
        if self._is_server:
            self._update(self.weights, self._gradient, self._received)
        dist.broadcast(self.weights, src=0)

    def _update(self, weights: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
        total = own.clone()
        for other in others:
            total.add_(other)
        weights.add_(total, alpha=-_LEARNING_RATE / self._size)


def _ring_update(world: World, gradient: Tensor, weights: Tensor) -> Action:
    """Make an update of every rank's weights by the average of the gradients, from Horovod's ring."""
    buffer = torch.empty_like(gradient)

    def update() -> None:
        buffer.copy_(gradient)
        world.average_(buffer, f"gradient.{buffer.numel()}")
        weights.add_(buffer, alpha=-_LEARNING_RATE)

    return update


def measure_server_and_ring(world: World, size: int, pairs: int) -> PairedTimes:
    """Return the seconds of ring and server for `size` bytes. Collective: every rank calls this."""
    gradient = _gradient(world, size)
    server, weights = ParameterServer(gradient), torch.zeros_like(gradient)
    ring, forms = _ring_update(world, gradient, weights), (server.in_pieces, server.gathered)
    for update in (*forms, ring, ring):
        update()
    assert_agree(f"weights after 2 updates of {size} bytes", weights, server.weights, 1e-5)
    peer = min(forms, key=lambda form: sum(begun_together(form)() for _ in range(_TRIALS)))
    return alternate(begun_together(ring), begun_together(peer), pairs)


def measure_ring(world: World, size: int, repeats: int) -> list[float]:
    """Return the seconds of the ring alone. Collective: every rank calls this."""
    gradient = _gradient(world, size)
    return _repeated(_ring_update(world, gradient, torch.zeros_like(gradient)), repeats)


def measure_replay(world: World, messages: Sequence[tuple[float, int]], repeats: int) -> list[float]:
    """Return the seconds of a backward that only sleeps, and sends each message when it is ready.

    Collective: every rank calls this.
    """
    buckets = [(ready, torch.zeros(size // 4)) for ready, size in messages]

    def backward() -> None:
        began = perf_counter()
        waits = []
        for number, (ready, bucket) in enumerate(buckets):
            time.sleep(max(0.0, began + ready - perf_counter()))
            waits.append(world.collectives.allreduce_async(bucket, f"replayed.{number}", 1.0))
        for wait in waits:
            wait()

    return _repeated(backward, repeats)


def _repeated(action: Action, repeats: int) -> list[float]:
    block = begun_together(action)
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


def begun_together(action: Action) -> TimedBlock:
    """Make a block that all ranks begin together and whose time is the slowest rank's."""

    def block() -> float:
        dist.barrier()
        began = perf_counter()
        action()
        seconds = torch.tensor(perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return block
