"""Runs Horovod's collectives on tensors of a device and prints the results; horovodrun starts it as one rank.

A run of one rank does not use Horovod, so the collectives are created explicitly.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from horovod_volo.cluster.collectives import HorovodCollectives
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange


def gradients_agree(world: World, device: torch.device) -> bool:
    """Return whether gradients reduced in buckets by Horovod equal those of autograd."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(device)
    reduced = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(device)
    reduced.load_state_dict(plain.state_dict())
    reducer = Reducer(reduced, world, Exchange(compression="none", bucket_mib=64 / 2**20), micro_batches=1)
    inputs = torch.randn(4, 5, device=device)
    expected = torch.autograd.grad(plain(inputs).square().sum(), list(plain.parameters()))
    reduced(inputs).square().sum().backward()
    with reducer.synchronized_gradients():
        found = [parameter.grad for parameter in reduced.parameters()]
        same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    return len(reducer.buckets) > 1 and same == [True] * len(expected)


def main() -> None:
    """Call every collective once."""
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    collectives = HorovodCollectives()
    world = World(launcher="horovodrun", controller=collectives.controller, collectives=collectives)
    results: dict[str, Any] = {}
    for dtype in (torch.float16, torch.float32, torch.float64):
        summed = torch.arange(4, dtype=dtype, device=device)
        collectives.allreduce_async(summed, f"sum.{dtype}", 0.5)()
        results[str(dtype)] = summed.tolist()
    sent = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=device)
    world.broadcast_([sent])
    results["broadcast"] = sent.tolist()
    results["total"] = world.sum_over_ranks(2.0, 3.0)
    results["gather"] = world.allgather_object("rank 0")
    results["built for the device"] = device.type == "cpu" or bool(hvd.nccl_built())
    results["gradients"] = gradients_agree(world, device)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
