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

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.finding import Finding, from_error, ok, run_check, warning

_UPGRADE = (
    "Install a version that is allowed: pip install --upgrade horovod_volo, or run ./tools/setup again."
)
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
    yield from _unallowed_version("torch")


def _horovod() -> Iterator[Finding]:
    from horovod_volo.cluster.horovod_build import BUILD, read_build

    if importlib.util.find_spec("horovod") is None and read_launch_env().size == 1:
        yield ok("horovod", f"not installed; one rank needs none. For several ranks build it: {BUILD}")
        return
    build = read_build()
    features = {"PyTorch": True, "MPI": build.mpi, "gloo": build.gloo, "NCCL": build.nccl}
    present = ", ".join(name for name, built in features.items() if built)
    missing = [name for name, built in features.items() if not built]
    yield ok("horovod", f"{build.version} with {present}{'; no ' + ', no '.join(missing) if missing else ''}")
    import torch

    if torch.cuda.is_available() and not build.nccl:
        yield warning(
            "horovod",
            "was built without NCCL: gradients pass through host memory",
            "Build it again on a machine with a GPU, or with HOROVOD_GPU_OPERATIONS=NCCL: "
            "HOROVOD_GPU_OPERATIONS=NCCL horovod-volo build_horovod prints the wheel to install.",
        )
    yield from compare_mpi(build.mpi_library, _mpirun_version())


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
        place, text = "on PATH", f"is not on PATH, and Horovod is built with {library}"
    elif _family_and_version(library) != _family_and_version(program):
        place = "first on PATH"
        text = f"on PATH is {program}, but Horovod is built with {library}: ranks may not find each other"
    else:
        return [ok("mpirun", f"{library}, the one that Horovod is built with")]
    remedy = f"Put the mpirun of {library} {place}, or start with `horovodrun --gloo`."
    return [warning("mpirun", text, remedy)]


def _family_and_version(text: str) -> tuple[bool, str]:
    """Return whether it is Open MPI, and the major version; minor versions are compatible."""
    number = re.search(r"\d+(?=\.\d)", text)
    return "open mpi" in text.lower() or "openrte" in text.lower(), number[0] if number else ""


def _dali() -> Iterator[Finding]:
    import torch

    from horovod_volo.data.image_decoder import INSTALL_DALI, dali_is_installed

    if dali_is_installed():
        yield ok("dali", _dali_version())
    elif torch.cuda.is_available():
        text = "is not installed: Pillow reads the images on the CPU, and the GPU may wait for them"
        yield warning("dali", text, f"{INSTALL_DALI}.")
    else:
        yield ok("dali", f"not installed; Pillow reads the images. To install it: {INSTALL_DALI}")


def _timm() -> Iterator[Finding]:
    importlib.import_module("horovod_volo.models.timm_api")
    yield ok("timm", importlib.metadata.version("timm"))
    yield from _unallowed_version("timm")


def _apex() -> Iterator[Finding]:
    if importlib.util.find_spec("apex") is None:
        yield ok("apex", "not installed; torch's fused AdamW is used")
        return
    from horovod_volo.optim.build import check_apex

    try:
        check_apex(instead="adamw")
    except UserError as error:
        problem = from_error("apex", error)
        yield warning("apex", problem.text, problem.remedy)
    else:
        yield ok("apex", "NVIDIA's, with its CUDA kernels")


def _dali_version() -> str:
    """Return name and version of the package that DALI is from: there is one for each version of CUDA."""
    packages = importlib.metadata.packages_distributions().get("nvidia", ())
    name = next((name for name in packages if name.startswith("nvidia-dali")), "")
    return f"{name} {importlib.metadata.version(name)}" if name else "version unknown"


def _unallowed_version(package: str) -> Iterator[Finding]:
    """Warn if the installed version is below the range of this package's requirements."""
    installed = importlib.metadata.version(package)
    for line in importlib.metadata.requires("horovod_volo") or ():
        match = re.match(rf"{package}\b[^;]*>=([\d.]+)", line)
        if match and _release(installed) < _release(match[1]):
            yield warning(package, f"is {installed}, but at least {match[1]} is needed", _UPGRADE)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers before the first part that is none: (2, 8, 0) of 2.8.0a0+cuda."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
