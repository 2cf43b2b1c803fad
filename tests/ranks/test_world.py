"""World gives the same results under every launcher; test_exchange.py checks it under two others.

That ranks which would train alone are refused is shown in tests/faults/test_doctor.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError
from tests.ranks.launching import on_ranks, python, run


def collectives(world: World) -> dict[str, Any]:
    """Return the results of World's attributes and collectives on this rank."""
    rows = world.gather(torch.full((3,), float(world.rank)), "rows")
    number = torch.tensor(world.rank)
    tensors = [torch.full((2, 2), float(world.rank)), number, torch.tensor([world.is_rank_zero])]
    world.broadcast_(tensors)
    world.assert_identical(tensors[:1], "broadcast tensors")
    channels_last = torch.full((2, 3, 4, 5), float(world.rank)).to(memory_format=torch.channels_last)
    world.broadcast_([channels_last])
    weights = torch.ones(1000)
    if world.rank == world.size - 1:
        weights.view(torch.int32)[7] ^= 1
    with pytest.raises(RuntimeError) as divergence:
        world.assert_identical([weights], "Weights")
    with pytest.raises(AllRanksError) as problem:
        world.run_on_all_ranks(lambda: fail_on(world.size - 1, world))
    return {
        "ranks": [world.rank, world.size, world.local_rank, world.local_size],
        "controller": world.controller,
        "total": world.sum_over_ranks(world.rank, 2.0**40 + world.rank),
        "rows": rows.tolist(),
        "broadcast": [tensor.tolist() for tensor in tensors],
        "channels_last_sum": float(channels_last.sum()),
        "gathered": world.allgather_object(f"from {world.rank}"),
        "broadcast_object": world.broadcast_object(f"from {world.rank}"),
        "problem": str(problem.value),
        "divergence": str(divergence.value),
    }


def fail_on(rank: int, world: World) -> None:
    if world.rank == rank:
        raise UserError("the disk is missing")


def check(found: list[dict[str, Any]], controller: str) -> None:
    """Assert that the results on all ranks are right."""
    ranks = len(found)
    for rank, result in enumerate(found):
        assert result == {
            "ranks": [rank, ranks, rank, ranks],
            "controller": controller,
            "total": [sum(range(ranks)), ranks * 2.0**40 + sum(range(ranks))],
            "rows": [[float(other)] * 3 for other in range(ranks)],
            "broadcast": [[[0.0, 0.0], [0.0, 0.0]], 0, [True]],
            "channels_last_sum": 0.0,
            "gathered": [f"from {other}" for other in range(ranks)],
            "broadcast_object": "from 0",
            "problem": f"the disk is missing (seen on rank {ranks - 1} of {ranks})",
            "divergence": f"Weights on rank {ranks - 1} differ from rank 0's.",
        }


def test_ranks_of_horovodrun_over_mpi_agree(tmp_path):
    (found,) = on_ranks(tmp_path, collectives, ranks=2, start_with="horovodrun-mpi")
    check(found, "MPI")


@pytest.mark.parametrize("plain", [True, False])
def test_a_warning_is_an_error(tmp_path, plain):
    """In an interpreter of its own, and in a fork of tests/ranks/fork_server.py."""
    (tmp_path / "program.py").write_text("import sys, warnings; warnings.warn(sys.argv[1])")
    command = [*python(plain), str(tmp_path / "program.py")]
    done = run([*command, "The .grad attribute of a Tensor that is not a leaf Tensor"])
    assert (done.returncode, done.stdout) == (0, "")
    done = run([*command, "of another kind"])
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "UserWarning: of another kind"
