"""What part of its host a rank may use: its share of the cores, and its GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.errors import UserError


@dataclass(frozen=True)
class Share:
    """A rank's part of its host."""

    device: torch.device
    threads: int  # compute threads; as many for data unless set otherwise
    cores: int  # that this process may run on, shared with the host's other ranks

    def __str__(self) -> str:
        return f"{self.device}; {self.threads} of {self.cores} cores, not pinned"


def share_of_host(world: World) -> Share:
    """Divide the cores this process may use among the host's ranks; local rank r takes GPU r."""
    cores = len(os.sched_getaffinity(0))
    return Share(device=_device(world), threads=max(1, cores // world.local_size), cores=cores)


def _device(world: World) -> torch.device:
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    if world.local_size > gpus:
        raise UserError(f"{world.local_size} ranks share a host with {gpus} GPUs. Start one rank a GPU.")
    return torch.device("cuda", world.local_rank)
