"""Parameters and floating-point operations of a network, block by block.

They are counted once, in a forward on the meta device, which computes nothing. Operations are those of matrix
products and convolutions; forward and backward together take three times those of the forward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.config.schema import Config
from horovod_volo.engine.task import Network, Task

PASSES = 3  # forwards that forward and backward are worth
_BATCH = 2  # batch norm needs more than one value per channel
_THROUGH_LAST_NUMBER = re.compile(r"(.*?\.)?\d+(?=\.)(?!.*\.\d+\.)")


@dataclass
class BlockCost:
    """One block of a network."""

    name: str
    kind: str  # its class, or nothing for a parameter of the network itself
    parameters: int = 0
    flops: float = 0.0  # of the forward of one image


@dataclass(frozen=True)
class ModelCost:
    """A network."""

    blocks: tuple[BlockCost, ...]
    forward_flops: float  # of one image; 0: not known
    problem: str = ""  # why it is not


UNKNOWN_COST = ModelCost((), 0.0)


class _Whole(nn.Module):
    """A network whose forward is that of training. The counter names its modules, as a part of this one."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self._forward = network.module, network.training_forward

    def forward(self, images: Tensor) -> object:
        return self._forward(images)


def count_cost(config: Config, task: Task, num_classes: int) -> ModelCost:
    """Build the network of a run on the meta device, and count what one image costs."""
    blocks: dict[str, BlockCost] = {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            network = task.build(config, num_classes)
            blocks = _blocks(network.module)
            side = config.model.img_size
            with FlopCounterMode(display=False) as counter:
                _Whole(network)(torch.empty(_BATCH, 3, side, side))
    # Networks of plugins and of timm may do what the meta device cannot, and may raise anything.
    except Exception as error:
        problem = str(error).partition("\n")[0] or type(error).__name__
        return ModelCost(tuple(blocks.values()), 0.0, problem)
    counts = counter.get_flop_counts()
    for name, block in blocks.items():  # without the operations of blocks inside it
        flops = sum(counts.get(f"{_Whole.__name__}.network.{name}", {}).values()) / _BATCH
        block.flops += flops
        if around := [other for other in blocks if name.startswith(f"{other}.")]:
            blocks[max(around, key=len)].flops -= flops
    return ModelCost(tuple(blocks.values()), counter.get_total_flops() / _BATCH)


def block_of(parameter: str) -> str:
    """Return the block of a parameter, by its name up to the last number, or else its first part."""
    found = _THROUGH_LAST_NUMBER.match(parameter)
    return found[0] if found else parameter.partition(".")[0]


def _blocks(network: nn.Module) -> dict[str, BlockCost]:
    blocks: dict[str, BlockCost] = {}
    for name, parameter in network.named_parameters():
        block = block_of(name)
        if block not in blocks:
            owner: Any = network
            for part in block.split("."):
                owner = getattr(owner, part)
            blocks[block] = BlockCost(block, type(owner).__name__ if isinstance(owner, nn.Module) else "")
        blocks[block].parameters += parameter.numel()
    return blocks
