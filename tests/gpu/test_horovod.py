"""Horovod's collectives and the reducer on tensors of a device.

NCCL needs one GPU per rank, and the test machines have one GPU, so there is one rank. This shows that Horovod
is built for the device; tests/ranks shows on the CPU that sums over ranks are correct.
"""

import sys

import torch
from torch import nn

from horovod_volo.cluster.collectives import HorovodCollectives
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange


def test_one_rank_through_horovod(device: torch.device) -> None:
    from tests.ranks.launching import launcher, python, run  # not known to the rank

    done = run([*launcher("gloo", 1), *python(), __file__, str(device)], seconds=180)
    assert done.returncode == 0, done.stdout
    assert "all agree" in done.stdout


if __name__ == "__main__":
    import horovod.torch as hvd

    # A run of one rank does not use Horovod, so the collectives are created explicitly.
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        assert hvd.nccl_built()
    collectives = HorovodCollectives()
    world = World(launcher="horovodrun", collectives=collectives, **collectives.position)
    for dtype in (torch.float16, torch.float32, torch.float64):
        summed = torch.arange(4, dtype=dtype, device=device)
        collectives.allreduce_async(summed, f"sum.{dtype}", 0.5)()
        assert summed.tolist() == [0.0, 0.5, 1.0, 1.5]
    sent = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=device)
    world.broadcast_([sent])
    assert sent.tolist() == [1.5, -2.0]
    assert list(world.sum_over_ranks(2.0, 3.0)) == [2.0, 3.0]
    assert world.allgather_object("rank 0") == ["rank 0"]

    # Gradients reduced in buckets by Horovod equal those of autograd.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(device)
    reduced = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(device)
    reduced.load_state_dict(plain.state_dict())
    reducer = Reducer(reduced, world, Exchange(compression="none", bucket_mib=64 / 2**20), micro_batches=1)
    inputs = torch.randn(4, 5, device=device)
    expected = torch.autograd.grad(plain(inputs).square().sum(), list(plain.parameters()))
    reduced(inputs).square().sum().backward()
    with reducer.synchronized_gradients():
        for parameter, gradient in zip(reduced.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
    assert len(reducer.buckets) > 1
    sys.stdout.write("all agree\n")
