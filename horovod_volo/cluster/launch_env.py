"""The rank and size that the launcher gave to this process, read from its environment variables.

Under a launcher that Horovod does not recognise, it silently runs with one rank. `World.connect` therefore
compares what is read here with what Horovod reports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Launcher, and its variables of rank, size, local rank, local size. The first launcher whose variables are
# set is taken.
_LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class LaunchEnv:
    """This process's rank and the number of ranks, according to the launcher."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = LaunchEnv(launcher="none", rank=0, size=1, local_rank=0, local_size=1)


def read_launch_env(environment: Mapping[str, str] = os.environ) -> LaunchEnv:
    """Read the launcher's variables; return `ALONE` without any."""
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if size in environment and rank in environment:
            return LaunchEnv(
                launcher,
                int(environment[rank]),
                int(environment[size]),
                int(environment.get(local_rank, 0)),
                _first_number(environment.get(local_size, "1")),
            )
    return ALONE


def _first_number(text: str) -> int:
    """Parse a number, or the first one of Slurm's "2(x3),1"."""
    return int(text.partition("(")[0].partition(",")[0])
