"""Floating-point operations of a network, and the refusal of runs that would take very long on a CPU.

They are counted once, in a forward on the meta device, which computes nothing. Operations are those of matrix
products and convolutions; forward and backward together take three times those of the forward.
"""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.cluster.missing_gpu import why_no_gpu
from horovod_volo.config.derived import derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError, counted
from horovod_volo.data.images.split_folder import is_image
from horovod_volo.engine.task import Task

PASSES = 3  # forwards that forward and backward are worth
_BATCH = 2  # batch norm needs more than one value per channel
# An assumption. VOLO-D1 trains with 62e9 to 70e9 on a core of an AMD EPYC with AVX-512 (docs/results.md).
_FLOPS_OF_CORE = 50e9
_LONGEST_STEP_SECONDS, _LONGEST_RUN_HOURS, _MANY = 30.0, 12.0, 100_000


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


def refuse_many_images(config: Config, task: Task, ranks: int, cores: int) -> None:
    """Refuse a run that is too long with its first 100,000 images: to list all may take minutes."""
    images = (file for file in Path(config.data.data_dir, "train").rglob("*") if is_image(file.name))
    if sum(1 for _ in islice(images, _MANY)) == _MANY:
        cost = count_cost(config, task, config.model.num_classes or 1000)
        refuse_long_run(config, cost, ranks, cores, _MANY)


def refuse_long_run(config: Config, cost: ModelCost, ranks: int, cores: int, images: int) -> None:
    """Raise UserError if a run is too long for so many cores per rank; one of unknown cost is not."""
    derived = derive(config, ranks=ranks, images=images)
    image = cost.forward_flops / (_FLOPS_OF_CORE * cores)  # seconds, forward
    step, fit = PASSES * image * derived.images_per_rank, config.model.fit_head * image * images / ranks
    hours = (fit + step * min(derived.total_steps, config.run.stop_at_step or derived.total_steps)) / 3600
    if (derived.total_steps and step > _LONGEST_STEP_SECONDS) or hours > _LONGEST_RUN_HOURS:
        raise UserError(
            f"This run is for GPUs, but {why_no_gpu()} On the CPU it would take {hours:,.0f} hours, "
            f"{step:,.1f} s per step: each rank has {counted(cores, 'core')}, with an assumed "
            f"{_FLOPS_OF_CORE / 1e9:.0f} GFLOP/s each. --device cpu starts it all the same."
        )
