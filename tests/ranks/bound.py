"""Saves the CPUs of a rank that trains, as the kernel has them: `--plugin tests.ranks.bound`, BOUND=OUT."""

import os
from pathlib import Path

import torch

from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.plugins import register_callback


@register_callback
class ThreadsOfRank(Callback):
    """Saves where the threads of a rank may run."""

    def logged(self, run: TrainContext, values: object) -> None:
        """Follow a log point."""
        status = [(task / "status").read_text().splitlines() for task in Path("/proc/self/task").iterdir()]
        cpus = [line.split()[1] for lines in status for line in lines if line.startswith("Cpus_allowed_list")]
        torch.save(cpus, Path(os.environ["BOUND"], f"rank_{run.world.rank}.pt"))
