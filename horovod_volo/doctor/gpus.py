"""Checks the GPUs, their driver, PyTorch's CUDA build and this package's kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from horovod_volo.cluster.topology import driver_versions, gpus_on_bus, read_text_or_empty
from horovod_volo.doctor.report import Finding, failure, ok, warning

_DRIVERS = {12: 525, 13: 580}  # the oldest that run a version of CUDA


def check_gpus() -> Iterator[Finding]:
    """Check GPUs, driver and PyTorch."""
    import torch

    driver, driver_cuda = driver_versions()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield assess_gpus(len(gpus_on_bus()), driver, driver_cuda, torch.version.cuda or "", names)


def assess_gpus(on_bus: int, driver: str, driver_cuda: int, torch_cuda: str, names: Sequence[str]) -> Finding:
    """Report the first reason why PyTorch cannot use the GPUs that are on the PCI bus.

    `driver_cuda` is the newest CUDA of the driver, as 12040 for 12.4, `torch_cuda` that of the PyTorch build,
    and `names` are the GPUs that PyTorch sees. An empty text means that there is none.
    """
    if not on_bus and not names:
        return ok("none; ranks compute on the CPU")
    hidden, torch_major = os.environ.get("CUDA_VISIBLE_DEVICES"), int(torch_cuda.partition(".")[0] or 0)
    if not driver:
        text = f"{on_bus} NVIDIA GPUs, but no driver responds"
        remedy = "Install NVIDIA's driver; start a container with the GPUs (--gpus all)."
    elif not torch_cuda:
        text = f"{on_bus} NVIDIA GPUs, but torch is built without CUDA"
        remedy = "Point pip at an index with torch's CUDA build, remove .venv, and run ./tools/setup again."
    elif driver_cuda and driver_cuda // 1000 < torch_major:
        newest = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}"
        text = f"driver {driver} supports CUDA up to {newest}, torch is built with {torch_cuda}"
        oldest = _DRIVERS.get(torch_major)
        wanted = f"driver {oldest} or newer" if oldest else f"a driver for CUDA {torch_cuda}"
        remedy = f"Install {wanted}, or a torch built with {newest}."
    elif not names:
        text = f"{on_bus} NVIDIA GPUs, but torch sees none"
        text += "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
        remedy = "Remove CUDA_VISIBLE_DEVICES from the job, or see what `nvidia-smi` reports."
    else:
        return ok(f"{len(names)} x {', '.join(dict.fromkeys(names))}, driver {driver}")
    return failure(text, remedy)


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


def check_kernels() -> Iterator[Finding]:
    """Check the Triton kernels on the first GPU, as a run of VOLO-D1 does when it starts."""
    import torch

    from horovod_volo.config.recipe import assemble
    from horovod_volo.models.build import build_model

    if not torch.cuda.is_available():
        return
    config = assemble({"model": "volo_d1", "batch_size": 64, "precision": "bf16"}, fallback_name="")
    with torch.device("meta"):
        model = build_model("volo_d1", img_size=224, num_classes=1000, drop_path=0.0)
    choice, device = (
        import_module("horovod_volo.kernels.choice"),
        torch.device("cuda", torch.cuda.current_device()),
    )
    for check in choice.kernel_checks(config, model, 1000, device):
        speed, problem = choice.outcome(check)
        if problem:
            remedy = (
                "Runs use PyTorch's operators for it. Report this, with the versions of torch and Triton."
            )
            yield warning(f"the kernel of {check.kernel} {problem}", remedy)
        else:
            yield ok(f"{check.kernel}: {speed:.1f} times as fast as PyTorch's operators")
