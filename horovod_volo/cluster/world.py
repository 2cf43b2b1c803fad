"""Rank, size and device of this process, and the collectives on objects, errors and small tensors."""

import hashlib
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import Collectives, HorovodCollectives, RankLostError, WaitForResult
from horovod_volo.cluster.launch_env import LaunchEnv, read_launch_env
from horovod_volo.cluster.missing_gpu import why_no_gpu
from horovod_volo.cluster.pinning import compute_threads, plan_own_binding
from horovod_volo.core.errors import UserError

T = TypeVar("T")


class AllRanksError(UserError):
    """A mistake that every rank has raised, so that rank 0 can print it once for all."""


@dataclass(frozen=True)
class World:
    """The ranks of this run, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    controller: str = "none"
    binding: Binding = field(default_factory=plan_own_binding)
    collectives: Collectives = field(default_factory=Collectives, repr=False)

    @classmethod
    def connect(cls, binding: Binding | None = None) -> "World":
        """Initialize Horovod with the ranks that the launcher started. Collective: every rank calls this."""
        binding = binding or plan_own_binding()
        launch = read_launch_env()
        if launch.size == 1:
            return cls(binding=binding)
        collectives = HorovodCollectives()
        _check_size(launch, collectives.position["size"])
        return cls(launcher=launch.launcher, binding=binding, collectives=collectives, **collectives.position)

    @classmethod
    def single(cls) -> "World":
        """Return a world of one rank; this does not need Horovod."""
        return cls()

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this rank writes files and prints messages."""
        return self.rank == 0

    def hosts(self) -> list[str]:
        """Return each rank's host name. Collective: every rank calls this."""
        return self.allgather_object(socket.gethostname())

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Collective: every rank calls this."""
        return self.collectives.allgather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value. Collective: every rank calls this."""
        return self.allgather_object(value if self.is_rank_zero else None)[0]

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sum over ranks of each value, exact up to 2^53. Collective: every rank calls this."""
        sums: list[float] = self.sum(torch.tensor(values, dtype=torch.float64), "total").tolist()
        return sums

    def sum(self, values: Tensor, name: str) -> Tensor:
        """Return the sum over ranks, in the memory of `values`. Collective: every rank calls this."""
        return self.collectives.allreduce_async(values, name)()

    def gather(self, row: Tensor, name: str) -> Tensor:
        """Return the flat tensors of all ranks (ranks, length). Collective: every rank calls this."""
        return self.collectives.allgather_async(row, name)().view(self.size, -1)

    def concatenate_async(self, part: Tensor, name: str) -> WaitForResult:
        """Start to concatenate the flat tensors of all ranks, which may differ in length. Collective."""
        # Horovod does not support bf16: concatenate the bytes.
        wait = self.collectives.allgather_async(part.view(torch.uint8), name)
        return lambda: wait().view(part.dtype)

    def broadcast_(self, tensors: Iterable[Tensor], root: int = 0) -> None:
        """Replace tensors by those of rank `root`. Collective: every rank calls this."""
        # All are started before the first wait: ranks agree once per cycle, on whatever has been started.
        broadcast = self.collectives.broadcast_async
        for wait in [broadcast(tensor, f"broadcast.{number}", root) for number, tensor in enumerate(tensors)]:
            wait()

    def leave_together(self) -> None:
        """Wait for all ranks, because launchers end the others when the first one exits. Collective."""
        if self.size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what launchers send: this rank leaves too
        with suppress(RankLostError):
            self.broadcast_object(None)

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; a UserError is raised on all. Collective: every rank calls this."""
        results: list[T] = []
        error: UserError | None = None
        try:
            results.append(action())
        except UserError as raised:
            error = raised
        self.raise_on_all_ranks(error)
        return results[0]

    def run_on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all ranks. Collective: every rank calls this."""
        result = self.run_on_all_ranks(action if self.is_rank_zero else lambda: None)
        broadcast: T = self.broadcast_object(result)
        return broadcast

    def raise_on_all_ranks(self, error: UserError | None) -> None:
        """Raise the first error of any rank on every rank. Collective: every rank calls this."""
        by_rank = self.allgather_object(None if error is None else str(error))
        text = next(filter(None, by_rank), None)
        if text is None:
            return
        ranks = [rank for rank, other in enumerate(by_rank) if other == text]
        on_all = len(ranks) == self.size or ranks == [0]
        where = "" if on_all else f" (seen on rank {', '.join(map(str, ranks))} of {self.size})"
        raise AllRanksError(text + where)

    def different_ranks(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the ranks whose tensors differ in a bit from those of most; all, if unclear. Collective."""
        hashes = self.allgather_object(_hash(tensors))
        usual, count = Counter(hashes).most_common(1)[0]
        is_clear = 2 * count > self.size
        return [rank for rank, other in enumerate(hashes) if other != usual or not is_clear]

    def assert_identical(self, tensors: Iterable[Tensor], description: str) -> None:
        """Raise if tensors differ from rank 0's in one bit. Collective: every rank calls this."""
        hashes = self.allgather_object(_hash(tensors))
        different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
        if different:
            raise RuntimeError(
                f"{description} on rank {', '.join(map(str, different))} differ from rank 0's."
            )


@dataclass(frozen=True)
class RankResources:
    """Device, threads and binding of a rank."""

    device: torch.device
    threads: int  # one for each CPU of the rank: for data, and for compute unless OMP_NUM_THREADS is set
    binding: str  # as it is logged

    def __str__(self) -> str:
        return f"{self.device}; {self.binding}"


def rank_resources(world: World, wanted: str = "auto") -> RankResources:
    """Return this rank's device, as --device wants, and threads; set both in torch. Collective."""
    device = world.run_on_all_ranks(lambda: _device(world, wanted))
    _check_devices(device, world)
    binding = world.binding
    torch.set_num_threads(compute_threads(binding.threads))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return RankResources(device, binding.threads, str(binding))


def _device(world: World, wanted: str) -> torch.device:
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if gpus == 0 and wanted == "cuda":
        raise UserError(f"--device cuda needs a GPU, but {why_no_gpu()}")
    if gpus == 0:
        return torch.device("cpu")
    if gpus == 1:  # the host has one, or the scheduler shows one to each rank
        return torch.device("cuda", 0)
    if world.local_size > gpus:
        raise UserError(f"{world.local_size} ranks share a host with {gpus} GPUs. Start one rank per GPU.")
    return torch.device("cuda", world.local_rank)


def _check_devices(device: torch.device, world: World) -> None:
    """Raise if two ranks use the same GPU, or only some have one. Collective: every rank calls this."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    gpus = world.allgather_object((socket.gethostname(), gpu))
    without = [rank for rank, (_, uuid) in enumerate(gpus) if not uuid]
    if 0 < len(without) < world.size:  # the same on all ranks
        raise AllRanksError(
            f"Rank {', '.join(map(str, without))} of {world.size} sees no GPU, but the others do. "
            "Run `horovod-volo doctor` under the same launcher to see why."
        )
    same = [rank for rank, other in enumerate(gpus) if gpu and other == gpus[world.rank]]
    sharing = f"Ranks {', '.join(map(str, same))} use the same GPU of {gpus[world.rank][0]}"
    world.raise_on_all_ranks(UserError(f"{sharing}. Start one rank per GPU.") if len(same) > 1 else None)


def _check_size(launch: LaunchEnv, size: int) -> None:
    if size != launch.size:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but Horovod sees {size}: every rank "
            "would train alone. Horovod must be built for this launcher: start with `horovodrun --gloo`, or "
            "with the `mpirun` of the MPI it was built with (see `horovodrun --check-build`)."
        )


def _hash(tensors: Iterable[Tensor]) -> str:
    """Hash tensors of 4- or 8-byte elements by the sums of their bits, plain and weighted by position."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(torch.int32).to(torch.int64)
        positions = torch.arange(1, len(bits) + 1, device=bits.device)
        sums.append(torch.stack([bits.sum(), (bits * positions).sum()]))
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()
