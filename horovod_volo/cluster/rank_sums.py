"""The exchanges of synchronised batch norm: small, named, and waited for at once."""

from __future__ import annotations

from torch import Tensor

from horovod_volo.cluster.world import World


class WorldSums:
    """Gathers and sums small tensors over the ranks of a world; counts how often."""

    def __init__(self, world: World) -> None:
        self.size = world.size
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
