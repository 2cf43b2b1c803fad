"""Computes a network's gradients of one batch, with batch norm over any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.dense.upernet import UperNet
from horovod_volo.models.sync_batch_norm import SyncBatchNorm, connect_norms, synchronize_norms
from tests.ranks.muon_steps import CountedCollectives

SIDE, CLASSES = 32, 5


@dataclass(frozen=True)
class NormStep:
    """One step; a call takes it on one of the ranks."""

    images: tuple[int, ...]  # of each rank
    norms: str = "heads"
    recomputed: bool = False

    def __call__(self, world: World) -> dict[str, Any]:
        """Take the step; return its numbers, and what was exchanged."""
        torch.manual_seed(0)
        network = Recomputed() if self.recomputed else upernet()
        if self.norms == "all":
            synchronize_norms(network)
        counted = CountedCollectives(world)
        connected = connect_norms(network, replace(world, collectives=counted))
        network.double().train()
        images = torch.randn(sum(self.images), 3, SIDE, SIDE, dtype=torch.float64)
        labels = torch.randint(CLASSES, (len(images), SIDE // 4, SIDE // 4))
        first = sum(self.images[: world.rank])
        own = slice(first, first + self.images[world.rank])
        inputs = images[own].requires_grad_()
        logits = network(inputs) if self.recomputed else network.training_logits(inputs, 1)
        labels = [labels[own, :: 8 // each.shape[2], :: 8 // each.shape[2]] for each in logits]
        losses = map(partial(F.cross_entropy, reduction="sum"), logits, labels)
        (sum(losses) / len(images)).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        exchanges = counted.calls
        world.collectives.allreduce_async(gradients, "gradients", 1.0)()
        return {
            "logits": logits[0].detach(),
            "inputs": inputs.grad,
            "gradients": gradients,
            "statistics": torch.cat([buffer.flatten().double() for buffer in network.buffers()]),
            "exchanges": exchanges,
            "norms": connected,
        }


def upernet() -> UperNet:
    """Return a small network that drops nothing at random."""
    settings = Segmentation(head_width=16, auxiliary_width=16)
    network = UperNet(Model(model="volo_demo", img_size=SIDE, drop_path=0.0), settings, CLASSES)
    for module in network.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return network


class Recomputed(nn.Module):
    """Two norms inside a block whose forward is repeated during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.block = nn.Sequential(
            SyncBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), SyncBatchNorm(8), nn.ReLU()
        )
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return logits at a quarter of the height and width."""
        return [self.head(checkpoint(self.block, self.stem(images), use_reentrant=False))]
