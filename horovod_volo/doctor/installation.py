"""Checks the installed packages, Horovod's MPI, and the GPUs with their driver."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.missing_gpu import first_reason
from horovod_volo.cluster.topology import driver_versions, gpus_on_bus, read_text_or_empty
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.report import Finding, failure, from_error, ok, warning

_VERSION_TIMEOUT_SECONDS = 20


def check_torch() -> Iterator[Finding]:
    """Report the version of torch, and its CUDA."""
    import torch

    yield ok(f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}")


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
            "was built without NCCL: GPUs exchange gradients through host memory, or not at all",
            f"Build it again: {BUILD} --nccl",
        )
    yield replace(compare_mpi(mpi_library() if mpi else "", _mpirun_version()), subject="mpirun")


def _mpirun_version() -> str:
    """Return the version line of the mpirun on PATH; empty without one."""
    if shutil.which("mpirun") is None:
        return ""
    command, seconds = ["mpirun", "--version"], _VERSION_TIMEOUT_SECONDS
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
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
    yield ok(importlib.metadata.version("timm"))


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


def check_gpus() -> Iterator[Finding]:
    """Check GPUs, driver and PyTorch."""
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield assess_gpus(len(gpus_on_bus()), *driver_versions(), torch.version.cuda or "", names)


def assess_gpus(on_bus: int, driver: str, driver_cuda: int, torch_cuda: str, names: Sequence[str]) -> Finding:
    """Report the GPUs that PyTorch sees, or why it sees none of those that are on the PCI bus."""
    if names:
        return ok(f"{len(names)} x {', '.join(dict.fromkeys(names))}, driver {driver}")
    if not on_bus:
        return ok("none; ranks compute on the CPU")
    return failure(*first_reason(on_bus, driver, driver_cuda, torch_cuda))


def check_rdma(root: Path = Path("/")) -> Iterator[Finding]:
    """Report whether InfiniBand cards reach the GPUs' memory: otherwise the host's halves the bandwidth."""
    if not gpus_on_bus(root) or not any((root / "sys/class/infiniband").glob("*")):
        return
    if any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        yield ok("InfiniBand cards reach the GPUs' memory: nvidia_peermem is loaded")
    elif "Open Kernel Module" in read_text_or_empty(root / "proc/driver/nvidia/version"):
        yield ok("InfiniBand cards may reach the GPUs' memory: the driver has dma-buf")
    else:
        yield warning(
            "gradients between hosts go through the memory of the host: nvidia_peermem is not loaded",
            "Run `modprobe nvidia_peermem` on every host. NCCL_DEBUG=INFO then says GDRDMA for each channel.",
        )
