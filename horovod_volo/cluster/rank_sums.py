"""The exchanges of synchronised batch norm, small and waited for at once, and of Muon. Each has a name, the
same on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_volo.cluster.collectives import WaitForResult
from horovod_volo.cluster.world import World


class WorldSums:
    """Gathers and sums tensors over the ranks of a world; counts how often."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.exchanges = 0
        self._collectives = world.collectives

    def gather(self, row: Tensor, name: str) -> Tensor:
        """Return the flat tensors of all ranks (ranks, length). Collective: every rank calls this."""
        self.exchanges += 1
        return self._collectives.allgather_async(row, name)().view(self.size, -1)

    def sum(self, values: Tensor, name: str) -> Tensor:
        """Return the sum over ranks, in the memory of `values`. Collective: every rank calls this."""
        self.exchanges += 1
        self._collectives.allreduce_async(values, name, 1.0)()
        return values

    def concatenate_async(self, part: Tensor, name: str) -> WaitForResult:
        """Start to concatenate the flat tensors of all ranks, which may differ in length. Collective."""
        self.exchanges += 1
        # Horovod does not support bf16: concatenate the bytes.
        wait = self._collectives.allgather_async(part.view(torch.uint8), name)
        return lambda: wait().view(part.dtype)
