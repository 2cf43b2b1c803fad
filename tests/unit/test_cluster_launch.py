"""Rank and size from each launcher's variables; the first launcher in the list takes precedence."""

from __future__ import annotations

import pytest

from horovod_volo.cluster.launch_env import ALONE, LaunchEnv, read_launch_env

SUFFIXES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
HOROVODRUN = dict(zip((f"HOROVOD_{suffix}" for suffix in SUFFIXES), "5814", strict=True))
OPEN_MPI = dict(zip((f"OMPI_COMM_WORLD_{suffix}" for suffix in SUFFIXES), "3412", strict=True))
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (HOROVODRUN, LaunchEnv("horovodrun", 5, 8, 1, 4)),
        (OPEN_MPI, LaunchEnv("mpirun", 3, 4, 1, 2)),
        (PMI, LaunchEnv("mpirun (PMI)", 0, 2, 0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchEnv("mpirun (PMI)", 1, 2, 0, 1)),
        (SRUN, LaunchEnv("srun", 6, 7, 0, 2)),
        (SRUN | OPEN_MPI, LaunchEnv("mpirun", 3, 4, 1, 2)),  # the inner launcher
        (SRUN | OPEN_MPI | HOROVODRUN, LaunchEnv("horovodrun", 5, 8, 1, 4)),
        (SRUN | PMI, LaunchEnv("mpirun (PMI)", 0, 2, 0, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,3"}, LaunchEnv("srun", 6, 7, 0, 4)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "7"}, LaunchEnv("srun", 6, 7, 0, 7)),
        ({}, ALONE),
        ({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "0"}, ALONE),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),  # a batch script, outside of any job step
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ALONE),  # a size without a rank
    ],
)
def test_rank_and_size_are_the_launchers(environment: dict[str, str], expected: LaunchEnv) -> None:
    assert read_launch_env(environment) == expected
