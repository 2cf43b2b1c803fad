"""Saves the results of World's attributes and collectives on this rank."""

import sys
from pathlib import Path

import torch

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError


def main(out: Path) -> None:
    world = World.connect()
    mean = torch.full((3,), float(world.rank))
    world.average_(mean, "mean")
    number = torch.tensor(world.rank)
    tensors = [torch.full((2, 2), float(world.rank)), number, torch.tensor([world.is_rank_zero])]
    world.broadcast_(tensors)
    world.assert_identical(tensors[:1], "broadcast tensors")
    channels_last = torch.full((2, 3, 4, 5), float(world.rank)).to(memory_format=torch.channels_last)
    world.broadcast_([channels_last])
    torch.save(
        {
            "ranks": [world.rank, world.size, world.local_rank, world.local_size],
            "controller": world.controller,
            "total": world.sum_over_ranks(world.rank, 2.0**40 + world.rank),
            "mean": mean,
            "broadcast": tensors,
            "channels_last_sum": float(channels_last.sum()),
            "gathered": world.allgather_object(f"from {world.rank}"),
            "broadcast_object": world.broadcast_object(f"from {world.rank}"),
            "problem": _problem_of_last_rank(world),
            "divergence": _divergence_of_last_rank(world),
        },
        out / f"rank_{world.rank}.pt",
    )


def _problem_of_last_rank(world: World) -> str:
    def check() -> None:
        if world.rank == world.size - 1:
            raise UserError("the disk is missing")

    try:
        world.run_on_all_ranks(check)
    except AllRanksError as error:
        return str(error)
    return "nothing was raised"


def _divergence_of_last_rank(world: World) -> str:
    weights = torch.ones(1000)
    if world.rank == world.size - 1:
        weights.view(torch.int32)[7] ^= 1
    try:
        world.assert_identical([weights], "Weights")
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
