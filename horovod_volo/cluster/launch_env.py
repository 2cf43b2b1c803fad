"""The rank and size that the launcher gave to this process, read from its environment variables.

Under a launcher that Horovod does not recognise, it silently runs with one rank. `World.connect` therefore
compares what is read here with what Horovod reports.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Of each launcher the variables of rank, size, local rank and local size; the first that are set are taken.
OWN = "horovod-volo"  # the launcher of --ranks, which sets Horovod's variables too
_LAUNCHERS = {
    OWN: "HOROVOD_VOLO_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
    "horovodrun": "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun (PMI)": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
}


@dataclass(frozen=True)
class LaunchEnv:
    """This process's rank and the number of ranks, according to the launcher."""

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


ALONE = LaunchEnv()


def read_launch_env(environment: Mapping[str, str] = os.environ) -> LaunchEnv:
    """Read the launcher's variables; return `ALONE` without any."""
    for launcher, variables in _LAUNCHERS.items():
        rank, size, local_rank, local_size = map(environment.get, variables.split())
        if rank and size:
            # Slurm writes "2(x3),1" for two tasks on each of three nodes, and one on the last.
            first_number = (local_size or "1").partition("(")[0].partition(",")[0]
            return LaunchEnv(launcher, int(rank), int(size), int(local_rank or 0), int(first_number))
    return ALONE
