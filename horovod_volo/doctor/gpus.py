"""Whether the host's GPUs, their driver and torch go together."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from horovod_volo.cluster.topology import gpus_on_bus
from horovod_volo.doctor.finding import Finding, attempt, failure, ok


@dataclass(frozen=True)
class Seen:
    """The GPUs, from the bus up to torch."""

    on_bus: int
    driver: str = ""  # version; empty: none answers
    driver_cuda: int = 0  # as CUDA writes it: 12040 is 12.4
    torch_cuda: str = ""  # that torch was built with
    to_torch: int = 0
    names: str = ""
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES


def look_at_gpus() -> list[Finding]:
    """Look at GPUs, driver and torch."""
    return attempt("gpu", lambda: judge_gpus(_see()))


def judge_gpus(seen: Seen) -> list[Finding]:
    """Say what keeps torch from the GPUs, the first cause only."""
    if not seen.on_bus and not seen.to_torch:
        return [ok("gpu", "none; ranks compute on the CPU")]
    there = f"{seen.on_bus} NVIDIA GPU{'s' if seen.on_bus > 1 else ''}"
    if not seen.driver:
        return [
            failure(
                "gpu",
                f"{there}, but no driver answers",
                "Install NVIDIA's driver; in a container, start it with the GPUs (--gpus all).",
            )
        ]
    if not seen.torch_cuda:
        return [
            failure(
                "gpu",
                f"{there}, but torch is built without CUDA",
                "Point pip at an index with torch's CUDA build, remove .venv, and run ./tools/setup again.",
            )
        ]
    if seen.driver_cuda and seen.driver_cuda // 1000 < int(seen.torch_cuda.partition(".")[0]):
        most = f"{seen.driver_cuda // 1000}.{seen.driver_cuda % 1000 // 10}"
        return [
            failure(
                "gpu",
                f"driver {seen.driver} is for CUDA up to {most}, torch is built with {seen.torch_cuda}",
                f"Install a driver for CUDA {seen.torch_cuda}, or a torch built for {most}.",
            )
        ]
    if not seen.to_torch:
        why = "" if seen.hidden is None else f" (CUDA_VISIBLE_DEVICES={seen.hidden!r})"
        return [
            failure(
                "gpu",
                f"{there}, but torch sees none{why}",
                "Take CUDA_VISIBLE_DEVICES out of the job, or see what `nvidia-smi` says of the GPUs.",
            )
        ]
    return [ok("gpu", f"{seen.to_torch} x {seen.names}, driver {seen.driver}")]


def _see() -> Seen:
    import torch

    from horovod_volo.cluster.nvml import driver_version

    count = torch.cuda.device_count()
    names = dict.fromkeys(torch.cuda.get_device_name(number) for number in range(count))
    return Seen(
        on_bus=len(gpus_on_bus()),
        driver=driver_version(),
        driver_cuda=_driver_cuda(),
        torch_cuda=torch.version.cuda or "",
        to_torch=count,
        names=", ".join(names),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _driver_cuda() -> int:
    try:
        library = ctypes.CDLL("libcuda.so.1")  # comes with the driver
    except OSError:
        return 0
    number = ctypes.c_int()
    return 0 if library.cuDriverGetVersion(ctypes.byref(number)) else number.value
