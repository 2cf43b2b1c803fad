"""The device and the number of threads that a rank uses."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch

from horovod_volo.cluster.pinning import compute_threads
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError


@dataclass(frozen=True)
class RankResources:
    """Device, threads and binding of a rank."""

    device: torch.device
    threads: int  # one for each CPU of the rank: for data, and for compute unless OMP_NUM_THREADS is set
    binding: str  # as it is logged

    def __str__(self) -> str:
        return f"{self.device}; {self.binding}"


def rank_resources(world: World) -> RankResources:
    """Return this rank's device and threads, and set both in torch. Collective: every rank calls this."""
    device = world.run_on_all_ranks(lambda: _device(world))
    _check_devices(device, world)
    binding = world.binding
    torch.set_num_threads(compute_threads(binding.threads))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return RankResources(device, binding.threads, str(binding))


def _device(world: World) -> torch.device:
    gpus = torch.cuda.device_count()
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
            "Run `python -m horovod_volo.doctor` under the same launcher to see why."
        )
    same = [rank for rank, other in enumerate(gpus) if gpu and other == gpus[world.rank]]
    sharing = f"Ranks {', '.join(map(str, same))} use the same GPU of {gpus[world.rank][0]}"
    world.raise_on_all_ranks(UserError(f"{sharing}. Start one rank per GPU.") if len(same) > 1 else None)
