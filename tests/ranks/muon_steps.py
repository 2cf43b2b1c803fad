"""Takes steps of Muon on any number of ranks, with the same gradients on each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from horovod_volo.cluster.world import World
from horovod_volo.models.build import build_model, hidden_matrices, spec_of
from horovod_volo.optim import muon
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr, state_tensors

STEPS = 5


class CountedCollectives:
    """The collectives of a world, and how many of them were called."""

    def __init__(self, world: World) -> None:
        self._collectives, self.calls = world.collectives, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._collectives, name)


@dataclass(frozen=True)
class MuonSteps:
    """Some steps of a network; a call takes them on one of the ranks."""

    network: str
    in_bf16: bool = False  # as on a GPU: the updates are computed and exchanged in bf16

    def __call__(self, world: World) -> dict[str, Any]:
        """Take the steps; return weights and state, and which matrices the rank has."""
        arithmetic = (lambda _: torch.bfloat16) if self.in_bf16 else muon.arithmetic
        with patch.object(muon, "arithmetic", arithmetic):
            return self._stepped(world)

    def _stepped(self, world: World) -> dict[str, Any]:
        torch.manual_seed(0)
        model = self._build()
        parameters = dict(model.named_parameters())
        matrices = hidden_matrices(model, spec_of("volo_demo").heads)
        groups = parameter_groups(
            parameters,
            parameters,
            exempt=(),
            weight_decay=0.05,
            layers={},
            layer_decay=1.0,
            matrices=matrices,
        )
        optimizer = build_optimizer("muon", groups, momentum=0.9)
        counted = CountedCollectives(world)
        optimizer.ranks = replace(world, collectives=counted)
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
            "own": len(optimizer._assignment[world.rank]),
            "exchanges": counted.calls,
        }

    def _build(self) -> nn.Module:
        if self.network == "odd shapes":
            linear = (nn.Linear(7, 19), nn.Linear(19, 7), nn.Linear(7, 7), nn.Linear(9, 4))
            return nn.Sequential(nn.Conv2d(5, 7, 3), *linear)
        if self.network == "one matrix":
            return nn.Sequential(nn.Linear(13, 6))
        return build_model("volo_demo", img_size=32, num_classes=7, drop_path=0.0)
