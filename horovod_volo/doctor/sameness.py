"""What must be the same on all ranks: versions, code, settings. Each rank holds its own against rank 0's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from horovod_volo.cluster.world import World
from horovod_volo.core.environment import collect_environment
from horovod_volo.doctor.finding import Finding, failure, ok

_PACKAGE = Path(__file__).parents[1]
_CODE = (".py", ".toml")

# Ranks that differ in one of these wait for each other, or add up different things. The names are listed:
# other variables of these libraries hold addresses that differ, and secrets.
SETTINGS = (
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET",
)


def look_for_differences(world: World) -> list[Finding]:
    """Hold this rank against rank 0. Collective: every rank calls this."""
    if world.size == 1:
        return []
    environment = collect_environment()
    versions = {"python": environment["python"], **environment["packages"]}
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    code = code_prints(_PACKAGE)
    return [
        compare_versions(versions, world.broadcast_object(versions)),
        compare_code(code, world.broadcast_object(code)),
        compare_settings(settings, world.broadcast_object(settings)),
    ]


def code_prints(package: Path) -> dict[str, str]:
    """Return a fingerprint of each file of the package's code and recipes."""
    files = (file for file in sorted(package.rglob("*")) if file.suffix in _CODE)
    return {
        file.relative_to(package).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def compare_versions(mine: Mapping[str, str], first: Mapping[str, str]) -> Finding:
    """Say which packages differ from rank 0's."""
    unlike = [f"{name} {mine[name]}, rank 0 has {first[name]}" for name in first if mine[name] != first[name]]
    if unlike:
        return failure("versions", "; ".join(unlike), "Run ./tools/setup on every host, or share one .venv.")
    return ok("versions", "the same on all ranks")


def compare_code(mine: Mapping[str, str], first: Mapping[str, str]) -> Finding:
    """Say in how many files the code differs from rank 0's, and which is the first."""
    unlike = [name for name in sorted({*mine, *first}) if mine.get(name) != first.get(name)]
    if unlike:
        others = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        return failure(
            "code",
            f"differs from rank 0's: {unlike[0]}{others}",
            "Bring every host to the same commit, or run from one shared folder.",
        )
    return ok("code", f"the same on all ranks, {len(mine)} files")


def compare_settings(mine: Mapping[str, str], first: Mapping[str, str]) -> Finding:
    """Say which settings differ from rank 0's."""
    unlike = [
        f"{name} is {mine.get(name, 'not set')}, on rank 0 {first.get(name, 'not set')}"
        for name in SETTINGS
        if mine.get(name) != first.get(name)
    ]
    if unlike:
        remedy = "Let the launcher pass it to all ranks: set it before horovodrun, or mpirun -x NAME."
        return failure("settings", "; ".join(unlike), remedy)
    return ok("settings", "of Horovod and NCCL the same on all ranks")
