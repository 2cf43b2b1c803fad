"""Refuses a run that is meant for GPUs where torch sees none: one that would take very long on the CPU.

A run that states its model is meant for GPUs if a step would take more than half a minute, or all more than
half a day, by the operations of the network. Small networks and few images train on a CPU.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from horovod_volo.cluster.missing_gpu import why_no_gpu
from horovod_volo.config.derived import derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError, counted
from horovod_volo.data.images.split_folder import is_image
from horovod_volo.engine.model_cost import PASSES, ModelCost, count_cost
from horovod_volo.engine.task import Task

# An assumption. VOLO-D1 trains with 62e9 to 70e9 on a core of an AMD EPYC with AVX-512 (docs/results.md).
_FLOPS_OF_CORE = 50e9
_LONGEST_STEP_SECONDS, _LONGEST_RUN_HOURS, _MANY = 30.0, 12.0, 100_000


def refuse_many_images(config: Config, task: Task, ranks: int, cores: int) -> None:
    """Refuse a run that is too long with its first 100,000 images: to list all may take minutes."""
    images = (file for file in Path(config.data.data_dir, "train").rglob("*") if is_image(file.name))
    if sum(1 for _ in islice(images, _MANY)) == _MANY:
        cost = count_cost(config, task, config.model.num_classes or 1000)
        refuse_long_run(config, cost, ranks, cores, _MANY)


def refuse_long_run(config: Config, cost: ModelCost, ranks: int, cores: int, images: int) -> None:
    """Raise UserError if a run is too long for so many cores per rank; one of unknown cost is not."""
    derived = derive(config, ranks=ranks, images=images)
    step = PASSES * cost.forward_flops * derived.images_per_rank / (_FLOPS_OF_CORE * cores)
    hours = step / 3600 * min(derived.total_steps, config.run.stop_at_step or derived.total_steps)
    if step > _LONGEST_STEP_SECONDS or hours > _LONGEST_RUN_HOURS:
        raise UserError(
            f"This run is for GPUs, but {why_no_gpu()} On the CPU it would take {hours:,.0f} hours, "
            f"{step:,.1f} s per step: each rank has {counted(cores, 'core')}, with an assumed "
            f"{_FLOPS_OF_CORE / 1e9:.0f} GFLOP/s each. --device cpu starts it all the same."
        )
