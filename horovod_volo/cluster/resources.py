"""What a rank uses of its host: a device, and as many threads as it has CPUs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

from horovod_volo.cluster.pinning import compute_threads
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError


@dataclass(frozen=True)
class RankResources:
    """A rank's part of its host."""

    device: torch.device
    threads: int  # as many as it has CPUs: for data, and for computing unless OMP_NUM_THREADS is set
    binding: str  # in words

    def __str__(self) -> str:
        return f"{self.device}; {self.binding}"


def rank_resources(world: World) -> RankResources:
    """Take this rank's share and keep torch within it. Collective: every rank calls this."""
    device = world.run_on_all_ranks(lambda: _device(world))
    _check_devices(device, world)
    bound = world.bound
    torch.set_num_threads(compute_threads(os.environ, bound.threads))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return RankResources(device, bound.threads, str(bound))


def _device(world: World) -> torch.device:
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    if gpus == 1:  # of the host, or the one that a scheduler shows to this rank alone
        return torch.device("cuda", 0)
    if world.local_size > gpus:
        raise UserError(f"{world.local_size} ranks share a host with {gpus} GPUs. Start one rank a GPU.")
    return torch.device("cuda", world.local_rank)


def _check_devices(device: torch.device, world: World) -> None:
    """Stop if two ranks have one GPU, or some ranks none. Collective: every rank calls this."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    places = world.allgather_object((socket.gethostname(), gpu))
    without = [rank for rank, (_, other) in enumerate(places) if not other]
    if 0 < len(without) < world.size:  # on all ranks alike
        raise AllRanksError(
            f"Rank {', '.join(map(str, without))} of {world.size} sees no GPU, the others do. "
            "`python -m horovod_volo.doctor` under the same launcher tells of each host."
        )
    mine = [rank for rank, place in enumerate(places) if gpu and place == places[world.rank]]
    sharing = f"Ranks {', '.join(map(str, mine))} have one GPU of {places[world.rank][0]} among them"
    world.raise_on_all_ranks(UserError(f"{sharing}. Start one rank a GPU.") if len(mine) > 1 else None)
