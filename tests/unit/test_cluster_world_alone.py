"""With one rank every collective is the identity, and errors are raised as on several ranks."""

import socket

import pytest
import torch

from horovod_volo.cluster.collectives import Collectives, Wait
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError


@pytest.fixture
def world() -> World:
    return World.connect()


def test_values_and_tensors_are_returned_unchanged(world: World) -> None:
    assert (world.rank, world.size, world.launcher, world.is_rank_zero) == (0, 1, "none", True)
    assert world.hosts() == [socket.gethostname()]
    value = {"any": ["thing", None]}
    assert world.allgather_object(value) == [value]
    assert world.broadcast_object(value) is value
    assert world.sum_over_ranks(1, 2.5, True, 2.0**53) == [1.0, 2.5, 1.0, 2.0**53]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor = torch.tensor([1.1, -0.0, float("inf"), 1e-7]).to(dtype)
        before = tensor.clone()
        assert world.sum(tensor, "some") is tensor
        world.broadcast_([tensor, torch.tensor(True), torch.zeros(0)])
        assert torch.equal(tensor, before)
        assert torch.equal(tensor.signbit(), before.signbit())
    world.assert_identical([torch.randn(5, 3).t(), torch.tensor(4), torch.tensor(float("nan"))], "Weights")
    world.collectives.allreduce_async(tensor := torch.tensor([3.0, -1.0]), "some", 0.5)()
    assert tensor.tolist() == [1.5, -0.5]


def test_all_broadcasts_are_started_before_the_first_wait() -> None:
    """One after the other, each would take a cycle of Horovod: seconds for the tensors of a model."""
    calls: list[str] = []

    class RecordedBroadcasts(Collectives):
        def broadcast_async(self, tensor: torch.Tensor, name: str, root: int = 0) -> Wait:
            calls.append("start")
            return lambda: calls.append("wait")

    World(size=2, collectives=RecordedBroadcasts()).broadcast_(torch.zeros(3, 2))
    assert calls == 3 * ["start"] + 3 * ["wait"]


def fail() -> None:
    raise UserError("the disk is missing. Insert it.")


@pytest.mark.parametrize("do", [World.run_on_all_ranks, World.run_on_rank_zero])
def test_an_action_returns_its_result_or_raises_its_error(do, world):
    assert do(world, lambda: 3) == 3
    with pytest.raises(AllRanksError, match=r"^the disk is missing\. Insert it\.$"):
        do(world, fail)  # the entry point prints it once for all ranks
    with pytest.raises(ZeroDivisionError):
        do(world, lambda: 1 // 0)
