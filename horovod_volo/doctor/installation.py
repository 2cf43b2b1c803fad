"""Checks the installed packages: Python, torch, Horovod and its MPI, DALI, timm and Apex."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.report import Finding, from_error, ok, warning

_VERSION_TIMEOUT_SECONDS = 20


def check_torch() -> Iterator[Finding]:
    """Report the version of torch, and its CUDA."""
    import torch

    yield ok(f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}")
    yield from compare_release("torch", importlib.metadata.version("torch"))


def check_horovod() -> Iterator[Finding]:
    """Report how Horovod was built, and its mpirun; fail where several ranks cannot use it."""
    from horovod_volo.cluster.collectives import BUILD, load_horovod, mpi_library

    if importlib.util.find_spec("horovod") is None and read_launch_env().size == 1:
        yield ok(f"not installed; one rank needs none. For several ranks build it: {BUILD}")
        return
    import torch

    hvd = load_horovod()
    mpi, nccl = hvd.mpi_built(), bool(hvd.nccl_built())
    features = {"PyTorch": True, "MPI": mpi, "gloo": hvd.gloo_built(), "NCCL": nccl}
    present = ", ".join(name for name, built in features.items() if built)
    missing = "".join(f", no {name}" for name, built in features.items() if not built)
    yield ok(f"{importlib.metadata.version('horovod')} with {present}{missing}")
    if torch.cuda.is_available() and not nccl:
        yield warning(
            "was built without NCCL: gradients pass through host memory",
            "Build it again on a machine with a GPU, or with HOROVOD_GPU_OPERATIONS=NCCL: "
            "HOROVOD_GPU_OPERATIONS=NCCL horovod-volo build_horovod prints the wheel to install.",
        )
    yield replace(compare_mpi(mpi_library() if mpi else "", _mpirun_version()), subject="mpirun")


def _mpirun_version() -> str:
    """Return the version line of the mpirun on PATH; empty without one."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    command = [program, "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_SECONDS, check=False
    )
    return next(iter(f"{done.stdout}{done.stderr}".splitlines()), "").strip()


def compare_mpi(library: str, program: str) -> Finding:
    """Compare the versions of Horovod's MPI and of mpirun: with two MPIs, each rank would run alone."""
    if not library:
        return ok(f"{program or 'none'}; not needed: Horovod is built without MPI")
    if not program:
        place, text = "on PATH", f"is not on PATH, and Horovod is built with {library}"
    elif _family_and_version(library) != _family_and_version(program):
        place = "first on PATH"
        text = f"on PATH is {program}, but Horovod is built with {library}: ranks may not find each other"
    else:
        return ok(f"{library}, the one that Horovod is built with")
    return warning(text, f"Put the mpirun of {library} {place}, or start with `horovodrun --gloo`.")


def _family_and_version(text: str) -> tuple[bool, str]:
    """Return whether it is Open MPI, and the major version; minor versions are compatible."""
    number = re.search(r"\d+(?=\.\d)", text)
    return "open mpi" in text.lower() or "openrte" in text.lower(), number[0] if number else ""


def check_dali() -> Iterator[Finding]:
    """Report whether DALI reads images, with the package that it is from: one for each version of CUDA."""
    import torch

    from horovod_volo.data.image_decoder import INSTALL_DALI, dali_is_installed

    if dali_is_installed():
        packages = importlib.metadata.packages_distributions().get("nvidia", ())
        name = next((name for name in packages if name.startswith("nvidia-dali")), "")
        yield ok(f"{name} {importlib.metadata.version(name)}" if name else "version unknown")
    elif torch.cuda.is_available():
        text = "is not installed: Pillow reads the images on the CPU, and the GPU may wait for them"
        yield warning(text, f"{INSTALL_DALI}.")
    else:
        yield ok(f"not installed; Pillow reads the images. To install it: {INSTALL_DALI}")


def check_timm() -> Iterator[Finding]:
    """Report the version of timm, once it imports."""
    importlib.import_module("horovod_volo.models.timm_api")
    version = importlib.metadata.version("timm")
    yield ok(version)
    yield from compare_release("timm", version)


def check_apex() -> Iterator[Finding]:
    """Report whether NVIDIA's Apex is installed, with its CUDA kernels."""
    if importlib.util.find_spec("apex") is None:
        yield ok("not installed; torch's fused AdamW is used")
        return
    from horovod_volo.optim.build import check_apex as raise_unless_usable

    try:
        raise_unless_usable(instead="adamw")
    except UserError as error:
        yield replace(from_error(error), level="warning")
    else:
        yield ok("NVIDIA's, with its CUDA kernels")


def compare_release(package: str, installed: str) -> Iterator[Finding]:
    """Warn if a version is below the range of this package's requirements."""
    for line in importlib.metadata.requires("horovod_volo") or ():
        needed = re.match(rf"{package}\b[^;]*>=([\d.]+)", line)
        # Of "2.8.0a0+cuda", as containers have it, the numbers before the first other part count.
        release = re.match(r"[\d.]*\d", installed)
        if needed and release and _numbers(release[0]) < _numbers(needed[1]):
            remedy = (
                "Install a newer version: pip install --upgrade horovod_volo, or run ./tools/setup again."
            )
            yield warning(f"is {installed}, but at least {needed[1]} is needed", remedy)


def _numbers(version: str) -> list[int]:
    return list(map(int, version.split(".")))
