"""Why PyTorch sees no GPU, with the remedy."""

import os
from pathlib import Path

from horovod_volo.cluster.topology import driver_versions, gpus_on_bus

_DRIVERS = {12: 525, 13: 580}  # the oldest that run a version of CUDA
_OF_SLURM = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}


def why_no_gpu() -> str:
    """Return the reason why PyTorch sees no GPU on this host, and the remedy."""
    import torch

    return "torch sees none: {}. {}".format(
        *first_reason(len(gpus_on_bus()), *driver_versions(), torch.version.cuda or "")
    )


def first_reason(on_bus: int, driver: str, driver_cuda: int, torch_cuda: str) -> tuple[str, str]:
    """Return the first reason that holds, and its remedy; CUDA 12.4 of a driver is 12040, none is empty."""
    gpus, hidden = f"{on_bus} NVIDIA GPUs, but", os.environ.get("CUDA_VISIBLE_DEVICES")
    torch_major = int(torch_cuda.partition(".")[0] or 0)
    lacks = "SLURM_JOB_ID" in os.environ and not _OF_SLURM & os.environ.keys()
    request = "Request GPUs for the Slurm job: sbatch --gpus-per-node N." if lacks else ""
    if not on_bus and not driver:
        return "this host has no NVIDIA GPU", request or "Start it on a host with a GPU."
    if not driver:
        missing = "" if Path("/dev/nvidiactl").exists() else " (no device file /dev/nvidiactl)"
        remedy = "Install NVIDIA's driver; start a container with the GPUs (--gpus all)."
        return f"{gpus} no driver responds{missing}", remedy
    if not torch_cuda:
        remedy = "Point pip at an index with torch's CUDA build, remove .venv, and run ./tools/setup again."
        return f"{gpus} torch is built without CUDA", remedy
    if driver_cuda and driver_cuda // 1000 < torch_major:
        newest, oldest = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}", _DRIVERS.get(torch_major)
        wanted = f"driver {oldest} or newer" if oldest else f"a driver for CUDA {torch_cuda}"
        text = f"driver {driver} supports CUDA up to {newest}, torch is built with {torch_cuda}"
        return text, f"Install {wanted}, or a torch built with {newest}."
    shown = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
    remedy = "Remove CUDA_VISIBLE_DEVICES from the job, or see what `nvidia-smi` reports."
    return f"{gpus} torch sees none{shown}", request or remedy
