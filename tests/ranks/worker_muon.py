"""Takes steps of Muon on any number of ranks, with the same gradients on each; saves weights and state."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horovod_volo.cluster.world import World, WorldSums
from horovod_volo.models.build import build_model, hidden_matrices, spec_of
from horovod_volo.optim import muon
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr, state_tensors
from horovod_volo.optim.muon import share_matrices

STEPS = 5


def odd_shapes() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(5, 7, 3), nn.Linear(7, 19), nn.Linear(19, 7), nn.Linear(7, 7), nn.Linear(9, 4)
    )


def one_matrix() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 6))


def volo() -> nn.Module:
    return build_model("volo_demo", img_size=32, num_classes=7, drop_path=0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    world = World.connect()
    results = {build.__name__: stepped(build, world) for build in (odd_shapes, one_matrix, volo)}
    # As on a GPU: the updates are computed and exchanged in bf16.
    muon.arithmetic = lambda _: torch.bfloat16
    results["bf16"] = stepped(volo, world)
    torch.save(results, out / f"rank_{world.rank}.pt")


def stepped(build: Any, world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build()
    heads = spec_of("volo_demo").heads
    parameters = dict(model.named_parameters())
    matrices = hidden_matrices(model, heads)
    groups = parameter_groups(
        parameters, parameters, exempt=(), weight_decay=0.05, layers={}, layer_decay=1.0, matrices=matrices
    )
    optimizer = build_optimizer("muon", groups, momentum=0.9)
    ranks = WorldSums(world)
    share_matrices(optimizer, ranks)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in parameters.values()])
    random = torch.Generator().manual_seed(1)
    set_lr(optimizer, 1e-2)
    for _ in range(STEPS):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()
    state = state_tensors(optimizer, parameters)
    world.assert_identical([*parameters.values(), *state.values()], "weights or state")
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    return {
        "weights": weights,
        "moved": float((weights - before).abs().max()),
        "state": state,
        "matrices": sorted(matrices),
        "own": len(optimizer._matrices.own),
        "exchanges": ranks.exchanges,
    }


if __name__ == "__main__":
    main()
