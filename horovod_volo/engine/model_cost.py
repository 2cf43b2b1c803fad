"""Floating-point operations of a network.

They are counted once, in a forward on the meta device, which computes nothing. Operations are those of matrix
products and convolutions; forward and backward together take three times those of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.config.schema import Config
from horovod_volo.engine.task import Task

PASSES = 3  # forwards that forward and backward are worth
_BATCH = 2  # batch norm needs more than one value per channel


class ModelCost(NamedTuple):
    """What one image costs."""

    forward_flops: float = 0.0  # 0: not known
    problem: str = ""  # why it is not


def count_cost(config: Config, task: Task, num_classes: int) -> ModelCost:
    """Build the network of a run on the meta device, and count what one image costs."""
    side = config.model.img_size
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            network = task.build(config, num_classes)
            with FlopCounterMode(display=False) as counter:
                network.training_forward(torch.empty(_BATCH, 3, side, side))
    # Networks of plugins and of timm may do what the meta device cannot, and may raise anything.
    except Exception as error:
        return ModelCost(problem=str(error).partition("\n")[0] or type(error).__name__)
    return ModelCost(counter.get_total_flops() / _BATCH)
