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
    for rank, saved in enumerate(found):
        assert saved["ranks"] == [rank, ranks, rank, ranks]
        assert saved["controller"] == controller
        assert saved["total"] == [sum(range(ranks)), ranks * 2.0**40 + sum(range(ranks))]
        assert torch.allclose(saved["mean"], torch.full((3,), (ranks - 1) / 2))
        assert [tensor.tolist() for tensor in saved["broadcast"]] == [[[0.0, 0.0], [0.0, 0.0]], 0, [True]]
        assert saved["channels_last_sum"] == 0.0
        assert saved["gathered"] == [f"from {other}" for other in range(ranks)]
        assert saved["broadcast_object"] == "from 0"
        suffix = f" (seen on rank {ranks - 1} of {ranks})" if ranks > 1 else ""
        assert saved["problem"] == "the disk is missing" + suffix
        differs = f"Weights on rank {ranks - 1} differ from rank 0's."
        assert saved["divergence"] == (differs if ranks > 1 else "nothing was raised")


def test_ranks_that_would_train_alone_are_refused(tmp_path):
    """Open MPI's variables announce two ranks; Horovod uses gloo without its launcher and reports one."""
    command = [sys.executable, str(HERE / "worker_world.py"), str(tmp_path)]
    variables = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }
    done = run(command, **variables)
    assert done.returncode != 0
    assert "started 2 ranks, but Horovod sees 1" in done.stdout
    assert not list(tmp_path.iterdir())
