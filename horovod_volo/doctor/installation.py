"""Checks the installed packages: Python, torch, Horovod and its MPI, DALI, timm and Apex."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

from horovod_volo.core.errors import UserError
from horovod_volo.doctor.finding import Finding, from_error, ok, run_check, warning

_SETUP = "Run ./tools/setup."
_VERSION_TIMEOUT_SECONDS = 20


def check_installation() -> list[Finding]:
    """Check every package that training needs."""
    return [
        ok("python", platform.python_version()),
        *run_check("torch", _torch),
        *run_check("horovod", _horovod),
        *run_check("dali", _dali),
        *run_check("timm", _timm),
        *run_check("apex", _apex),
    ]


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield ok("torch", f"{torch.__version__}, {cuda}")
    yield from _other_version("torch", "torch")


def _horovod() -> Iterator[Finding]:
    from horovod_volo.cluster.horovod_build import read_build

    build = read_build()
    features = {"PyTorch": True, "MPI": build.mpi, "gloo": build.gloo, "NCCL": build.nccl}
    present = ", ".join(name for name, built in features.items() if built)
    missing = [name for name, built in features.items() if not built]
    yield ok("horovod", f"{build.version} with {present}{'; no ' + ', no '.join(missing) if missing else ''}")
    yield from _nccl(build.nccl)
    yield from _other_version("horovod", "horovod")
    yield from compare_mpi(build.mpi_library, _mpirun_version())


def _nccl(built: bool) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available() and not built:
        yield warning(
            "horovod",
            "was built without NCCL: gradients pass through host memory",
            "Build it on a machine with a GPU, or with HOROVOD_GPU_OPERATIONS=NCCL ./tools/build_horovod.",
        )


def _mpirun_version() -> str:
    """Return the version line of the mpirun on PATH; empty without one."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    done = subprocess.run(
        [program, "--version"],
        capture_output=True,
        text=True,
        timeout=_VERSION_TIMEOUT_SECONDS,
        check=False,
    )
    return next(iter(f"{done.stdout}{done.stderr}".splitlines()), "").strip()


def compare_mpi(library: str, program: str) -> list[Finding]:
    """Compare Horovod's MPI with the mpirun on PATH: with two MPIs, each rank would run alone."""
    if not library:
        return [ok("mpirun", f"{program or 'none'}; not needed: Horovod is built without MPI")]
    if not program:
        return [
            warning(
                "mpirun",
                f"is not on PATH, and Horovod is built with {library}",
                f"Put the mpirun of {library} on PATH, or start with `horovodrun --gloo`.",
            )
        ]
    if _family_and_version(library) != _family_and_version(program):
        return [
            warning(
                "mpirun",
                f"on PATH is {program}, but Horovod is built with {library}: ranks may not find each other",
                f"Put the mpirun of {library} first on PATH, or start with `horovodrun --gloo`.",
            )
        ]
    return [ok("mpirun", f"{library}, the one that Horovod is built with")]


def _family_and_version(text: str) -> tuple[bool, str]:
    """Return whether it is Open MPI, and the major version; minor versions are compatible."""
    number = re.search(r"\d+(?=\.\d)", text)
    return "open mpi" in text.lower() or "openrte" in text.lower(), number[0] if number else ""


def _dali() -> Iterator[Finding]:
    importlib.import_module("horovod_volo.data.pipeline")  # the only module that imports DALI
    yield ok("dali", _name_and_version("nvidia-dali"))
    yield from _other_version("dali", "nvidia-dali")


def _timm() -> Iterator[Finding]:
    importlib.import_module("horovod_volo.models.timm_api")
    yield ok("timm", _name_and_version("timm"))
    yield from _other_version("timm", "timm")


def _apex() -> Iterator[Finding]:
    if importlib.util.find_spec("apex") is None:
        yield ok("apex", "not installed; torch's fused AdamW is used")
        return
    from horovod_volo.optim.apex_optimizers import check_apex

    try:
        check_apex(instead="adamw")
    except UserError as error:
        problem = from_error("apex", error)
        yield warning("apex", problem.text, problem.remedy)
    else:
        yield ok("apex", "NVIDIA's, with its CUDA kernels")


def _pinned_versions() -> dict[str, str]:
    """Return the exact versions in this package's requirements, by package."""
    exact = (
        re.match(r"([\w-]+)==([\w.]+)", line) for line in importlib.metadata.requires("horovod_volo") or ()
    )
    return {match[1]: match[2] for match in exact if match}


def _name_and_version(prefix: str) -> str:
    """Return name and installed version of the requirement whose name starts with `prefix`."""
    name = next((name for name in _pinned_versions() if name.startswith(prefix)), prefix)
    version = importlib.metadata.version(name)
    return version if name == prefix else f"{name} {version}"


def _other_version(subject: str, prefix: str) -> Iterator[Finding]:
    """Warn if the installed version is not the required one."""
    for name, required in _pinned_versions().items():
        if name.startswith(prefix):
            installed = importlib.metadata.version(name)
            if installed.partition("+")[0] != required:
                yield warning(subject, f"is {installed}; only {required} is tested", _SETUP)
