"""World gives the same results under every launcher, and refuses a size that Horovod does not report."""

import socket
import sys

import pytest
import torch

from tests.ranks.launching import HERE, ranks_of, run


@pytest.mark.parametrize(
    ("start_with", "ranks", "controller"),
    [("gloo", 3, "gloo"), ("horovodrun-mpi", 2, "MPI"), ("mpi", 3, "MPI"), ("none", 1, "none")],
)
def test_ranks_agree(tmp_path, start_with, ranks, controller):
    found = ranks_of("world", tmp_path, ranks=ranks, start_with=start_with)
    for rank, seen in enumerate(found):
        assert seen["facts"] == [rank, ranks, rank, ranks]
        assert seen["controller"] == controller
        assert seen["total"] == [sum(range(ranks)), ranks * 2.0**40 + sum(range(ranks))]
        assert torch.allclose(seen["mean"], torch.full((3,), (ranks - 1) / 2))
        assert [tensor.tolist() for tensor in seen["broadcast"]] == [[[0.0, 0.0], [0.0, 0.0]], 0, [True]]
        assert seen["channels_last_sum"] == 0.0
        assert seen["gathered"] == [f"from {other}" for other in range(ranks)]
        assert seen["shared"] == "from 0"
        suffix = f" (seen on rank {ranks - 1} of {ranks})" if ranks > 1 else ""
        assert seen["problem"] == "the disk is missing" + suffix
        differs = f"Weights on rank {ranks - 1} differ from rank 0's."
        assert seen["divergence"] == (differs if ranks > 1 else "nothing was raised")


def test_ranks_that_would_train_alone_are_refused(tmp_path):
    """Open MPI's variables say two ranks; Horovod uses gloo without its launcher and reports one."""
    words = [sys.executable, str(HERE / "worker_world.py"), str(tmp_path)]
    variables = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }
    done = run(words, **variables)
    assert done.returncode != 0
    assert "started 2 ranks, but Horovod sees 1" in done.stdout
    assert not list(tmp_path.iterdir())
