"""What is installed, and whether it can be used: Python, torch, Horovod, MPI, DALI, timm, Apex."""

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
from horovod_volo.doctor.finding import Finding, attempt, from_error, ok, warning

_SETUP = "Run ./tools/setup."
_SECONDS = 20  # for a program that only tells its version


def look_at_installation() -> list[Finding]:
    """Look at every package that training needs."""
    return [
        ok("python", platform.python_version()),
        *attempt("torch", _torch),
        *attempt("horovod", _horovod),
        *attempt("dali", _dali),
        *attempt("timm", _timm),
        *attempt("apex", _apex),
    ]


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield ok("torch", f"{torch.__version__}, {cuda}")
    yield from _unlike_asked("torch", "torch")


def _horovod() -> Iterator[Finding]:
    from horovod_volo.cluster.horovod_build import read_build

    build = read_build()
    parts = {"PyTorch": True, "MPI": build.mpi, "gloo": build.gloo, "NCCL": build.nccl}
    without = [name for name, there in parts.items() if not there]
    there = ", ".join(name for name, there in parts.items() if there)
    yield ok("horovod", f"{build.version} with {there}{'; no ' + ', no '.join(without) if without else ''}")
    yield from _nccl(build.nccl)
    yield from _unlike_asked("horovod", "horovod")
    yield from compare_mpi(build.mpi_library, _mpirun())


def _nccl(built: bool) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available() and not built:
        yield warning(
            "horovod",
            "was built without NCCL: gradients go from GPU to GPU through host memory",
            "Build it on a machine with a GPU, or with HOROVOD_GPU_OPERATIONS=NCCL ./tools/build_horovod.",
        )


def _mpirun() -> str:
    """Return what the mpirun on PATH calls itself; nothing without one."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    return next(iter(f"{done.stdout}{done.stderr}".splitlines()), "").strip()


def compare_mpi(library: str, program: str) -> list[Finding]:
    """Hold the MPI inside Horovod against the mpirun on PATH: of two MPIs, each rank would be alone."""
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
    mine, its = _family_and_version(library), _family_and_version(program)
    if mine != its:
        return [
            warning(
                "mpirun",
                f"on PATH is {program}, but Horovod is built with {library}: it may start ranks that do not "
                "find each other",
                f"Put the mpirun of {library} first on PATH, or start with `horovodrun --gloo`.",
            )
        ]
    return [ok("mpirun", f"{library}, Horovod's own")]


def _family_and_version(text: str) -> tuple[bool, str]:
    """Tell Open MPI from others, and its major version: minor ones understand each other."""
    number = re.search(r"\d+(?=\.\d)", text)
    return "open mpi" in text.lower() or "openrte" in text.lower(), number[0] if number else ""


def _dali() -> Iterator[Finding]:
    importlib.import_module("horovod_volo.data.pipeline")  # DALI's one door
    yield ok("dali", _installed("nvidia-dali"))
    yield from _unlike_asked("dali", "nvidia-dali")


def _timm() -> Iterator[Finding]:
    importlib.import_module("horovod_volo.models.timm_api")
    yield ok("timm", _installed("timm"))
    yield from _unlike_asked("timm", "timm")


def _apex() -> Iterator[Finding]:
    if importlib.util.find_spec("apex") is None:
        yield ok("apex", "not installed; torch's own fused AdamW serves")
        return
    from horovod_volo.optim.apex_optimizers import check_apex

    try:
        check_apex(instead="adamw")
    except UserError as problem:
        found = from_error("apex", problem)
        yield warning("apex", found.text, found.remedy)
    else:
        yield ok("apex", "NVIDIA's, with its CUDA kernels")


def _asked() -> dict[str, str]:
    """Return the versions that this package asks for exactly, by package."""
    exact = (
        re.match(r"([\w-]+)==([\w.]+)", line) for line in importlib.metadata.requires("horovod_volo") or ()
    )
    return {match[1]: match[2] for match in exact if match}


def _installed(beginning: str) -> str:
    """Return name and version of the package that is asked for by a name with this beginning."""
    name = next((name for name in _asked() if name.startswith(beginning)), beginning)
    version = importlib.metadata.version(name)
    return version if name == beginning else f"{name} {version}"


def _unlike_asked(subject: str, beginning: str) -> Iterator[Finding]:
    for name, wanted in _asked().items():
        if name.startswith(beginning):
            there = importlib.metadata.version(name)
            if there.partition("+")[0] != wanted:
                yield warning(subject, f"is {there}; everything was tried with {wanted}", _SETUP)
