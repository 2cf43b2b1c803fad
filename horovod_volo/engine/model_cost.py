"""Parameters and floating-point operations of a network, block by block.

They are counted once, in a forward on the meta device, which computes nothing. Operations are those of matrix
products and convolutions; forward and backward together take three times those of the forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.config.schema import Config
from horovod_volo.engine.task import Task

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


def count_cost(config: Config, task: Task, num_classes: int) -> ModelCost:
    """Build the network of a run on the meta device, and count what one image costs."""
    blocks: dict[str, BlockCost] = {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            network = task.build(config, num_classes)
            blocks = _blocks(network.module)
            side = config.model.img_size
            images = torch.empty(_BATCH, 3, side, side)
            with FlopCounterMode(display=False) as counter, _Counted(network.module, blocks, counter):
                network.training_forward(images)
    # Networks of plugins and of timm may do what the meta device cannot, and may raise anything.
    except Exception as error:
        for block in blocks.values():
            block.flops = 0.0  # of a part of the forward
        problem = str(error).partition("\n")[0] or type(error).__name__
        return ModelCost(tuple(blocks.values()), 0.0, problem)
    for block in blocks.values():
        block.flops /= _BATCH
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


class _Counted:
    """Adds the operations of each block to it, without those of blocks inside it."""

    def __init__(self, network: nn.Module, blocks: dict[str, BlockCost], counter: FlopCounterMode) -> None:
        self._network, self._blocks, self._counter = network, blocks, counter
        self._open: list[tuple[int, int]] = []  # operations before each open block; those of blocks inside it

    def __enter__(self) -> None:
        self._hooks = list(self._hooked())

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hooked(self) -> Iterable[Any]:
        modules = dict(self._network.named_modules())
        for name, block in self._blocks.items():
            if name in modules:
                yield modules[name].register_forward_pre_hook(self._begin)
                yield modules[name].register_forward_hook(lambda *_, block=block: self._end(block))

    def _begin(self, *_: object) -> None:
        self._open.append((self._counter.get_total_flops(), 0))

    def _end(self, block: BlockCost) -> None:
        before, inside = self._open.pop()
        total = self._counter.get_total_flops() - before
        block.flops += total - inside
        if self._open:
            outer, inside_outer = self._open[-1]
            self._open[-1] = (outer, inside_outer + total)
