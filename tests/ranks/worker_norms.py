"""Computes UperNet's gradients of one batch, with batch norm over any number of ranks."""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.cluster.world import World, WorldSums
from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.dense.upernet import UperNet
from horovod_volo.models.sync_batch_norm import SyncBatchNorm, connect_norms, synchronize_norms

SIDE, CLASSES = 32, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[6], help="images of each rank")
    parser.add_argument("--norms", default="heads")
    parser.add_argument("--recomputed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World.connect()
    torch.manual_seed(0)
    network = Recomputed() if options.recomputed else upernet()
    if options.norms == "all":
        synchronize_norms(network)
    ranks = WorldSums(world)
    connected = connect_norms(network, ranks)
    network.double().train()
    images = torch.randn(sum(options.images), 3, SIDE, SIDE, dtype=torch.float64)
    labels = torch.randint(CLASSES, (len(images), SIDE // 4, SIDE // 4))
    first = sum(options.images[: world.rank])
    own = slice(first, first + options.images[world.rank])
    inputs = images[own].requires_grad_()
    logits = network(inputs) if options.recomputed else network.training_logits(inputs, 1)
    labels = [labels[own, :: 8 // each.shape[2], :: 8 // each.shape[2]] for each in logits]
    losses = map(partial(F.cross_entropy, reduction="sum"), logits, labels)
    (sum(losses) / len(images)).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    exchanges = ranks.exchanges
    world.collectives.allreduce_async(gradients, "gradients", 1.0)()
    statistics = torch.cat([buffer.flatten().double() for buffer in network.buffers()])
    result = {
        "logits": logits[0].detach(),
        "inputs": inputs.grad,
        "gradients": gradients,
        "statistics": statistics,
        "exchanges": exchanges,
        "norms": connected,
    }
    torch.save(result, options.out / f"rank_{world.rank}.pt")


def upernet() -> UperNet:
    """Return a small network that drops nothing at random."""
    settings = Segmentation(head_width=16, auxiliary_width=16)
    network = UperNet(Model(model="volo_demo", img_size=SIDE), settings, CLASSES)
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


if __name__ == "__main__":
    main()
