"""This process among the others: rank facts, and the few things ranks say to each other."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import Collectives, HorovodCollectives, LocalCollectives
from horovod_volo.cluster.launch_env import LaunchEnv, read_launch_env
from horovod_volo.cluster.pinning import unbound
from horovod_volo.core.errors import UserError

T = TypeVar("T")


class AllRanksError(UserError):
    """A mistake that every rank knows of: one of them may speak for all."""


@dataclass(frozen=True)
class World:
    """All ranks of this run, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    controller: str = "none"
    bound: Binding = field(default_factory=unbound)
    collectives: Collectives = field(default_factory=LocalCollectives, repr=False)

    @classmethod
    def connect(cls, bound: Binding | None = None) -> World:
        """Meet the other ranks that the launcher started. Collective: every rank calls this."""
        bound = bound or unbound()
        promise = read_launch_env()
        if promise.size == 1:
            return cls(bound=bound)
        ring = HorovodCollectives()
        _hold_to(promise, ring)
        return cls(
            rank=ring.rank,
            size=ring.size,
            local_rank=ring.local_rank,
            local_size=ring.local_size,
            launcher=promise.launcher,
            controller=ring.controller,
            bound=bound,
            collectives=ring,
        )

    @classmethod
    def single(cls) -> World:
        """Make a world of one rank; no Horovod is needed for it."""
        return cls()

    @property
    def is_rank_zero(self) -> bool:
        """Say whether this rank writes files and speaks to the user."""
        return self.rank == 0

    def hosts(self) -> list[str]:
        """Name each rank's host. Collective: every rank calls this."""
        return self.allgather_object(socket.gethostname())

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Collective: every rank calls this."""
        return self.collectives.allgather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value. Collective: every rank calls this."""
        return self.collectives.broadcast_object(value)

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Add each value over ranks, exactly up to 2^53. Collective: every rank calls this."""
        sums = torch.tensor(values, dtype=torch.float64)
        self.collectives.allreduce_async(sums, "total", 1.0)()
        return [float(value) for value in sums]

    def average_(self, tensor: Tensor, name: str) -> None:
        """Replace a float tensor by its mean over ranks. Collective: every rank calls this."""
        self.collectives.allreduce_async(tensor, name, 1.0 / self.size)()

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by rank 0's. Collective: every rank calls this."""
        for number, tensor in enumerate(tensors):
            self.collectives.broadcast(tensor, f"broadcast.{number}")

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Do `action` on every rank; all raise what any finds wrong. Collective: every rank calls this."""
        results: list[T] = []
        problem: UserError | None = None
        try:
            results.append(action())
        except UserError as error:
            problem = error
        self.raise_on_all_ranks(problem)
        return results[0]

    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        """Do `action` on rank 0 and return its result on all. Collective: every rank calls this."""
        result = self.run_on_all_ranks(action if self.is_rank_zero else lambda: None)
        shared: T = self.broadcast_object(result)
        return shared

    def raise_on_all_ranks(self, problem: UserError | None) -> None:
        """Raise on every rank what any rank found wrong, said once. Collective: every rank calls this."""
        found = self.allgather_object(None if problem is None else str(problem))
        texts = {text: [rank for rank, other in enumerate(found) if other == text] for text in found if text}
        if not texts:
            return
        text, ranks = next(iter(texts.items()))
        on_all = len(ranks) == self.size or ranks == [0]
        where = "" if on_all else f" (seen on rank {', '.join(map(str, ranks))} of {self.size})"
        raise AllRanksError(text + where)

    def assert_same(self, tensors: Iterable[Tensor], what: str) -> None:
        """Stop if a rank's tensors differ from rank 0's in one bit. Collective: every rank calls this."""
        prints = self.allgather_object(_fingerprint(tensors))
        others = [rank for rank, other in enumerate(prints) if other != prints[0]]
        if others:
            raise RuntimeError(f"{what} on rank {', '.join(map(str, others))} differ from rank 0's.")


def _hold_to(promise: LaunchEnv, ring: HorovodCollectives) -> None:
    if ring.size != promise.size:
        raise UserError(
            f"{promise.launcher} started {promise.size} ranks, but Horovod sees {ring.size}: every rank "
            "would train alone. Horovod must be built for this launcher: start with `horovodrun --gloo`, or "
            "with the `mpirun` of the MPI it was built with (`horovodrun --check-build` tells)."
        )


def _fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash tensors of 4- or 8-byte elements: their bits summed, and summed by position, on their device."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(torch.int32).to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        sums.append(torch.stack([bits.sum(), (bits * places).sum()]))
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()
