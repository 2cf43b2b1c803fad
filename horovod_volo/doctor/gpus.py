"""Checks the GPUs, their driver and PyTorch's CUDA build."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from horovod_volo.cluster.topology import driver_versions, gpus_on_bus, read_text_or_empty
from horovod_volo.doctor.finding import Finding, failure, ok, run_check, warning

_DRIVERS = {12: 525, 13: 580}  # the oldest that run a version of CUDA


@dataclass(frozen=True)
class GpuState:
    """What the PCI bus, the driver and PyTorch report about GPUs."""

    on_bus: int
    driver: str = ""  # version; empty: no driver responds
    driver_cuda: int = 0  # newest CUDA version of the driver, in CUDA's format: 12040 is 12.4
    torch_cuda: str = ""  # CUDA version of the PyTorch build; empty: built without
    torch_gpus: int = 0
    names: str = ""
    cuda_visible_devices: str | None = None


def check_gpus() -> list[Finding]:
    """Check GPUs, driver and PyTorch."""
    return [*run_check("gpu", lambda: assess_gpus(_read_state())), *run_check("gpudirect", assess_rdma)]


def check_kernels() -> list[Finding]:
    """Check the Triton kernels on the first GPU, as a run of VOLO-D1 does when it starts."""
    return run_check("kernels", _assess_kernels)


def _assess_kernels() -> list[Finding]:
    import torch

    from horovod_volo.config.values import assemble
    from horovod_volo.kernels.choice import kernel_checks, outcome
    from horovod_volo.models.build import build_model

    if not torch.cuda.is_available():
        return []
    config = assemble({"model": "volo_d1", "batch_size": 64, "precision": "bf16"}, fallback_name="")
    with torch.device("meta"):
        model = build_model("volo_d1", img_size=224, num_classes=1000, drop_path=0.0)
    findings = []
    for check in kernel_checks(config, model, 1000, torch.device("cuda", torch.cuda.current_device())):
        speed, problem = outcome(check)
        if problem:
            remedy = (
                "Runs use PyTorch's operators for it. Report this, with the versions of torch and Triton."
            )
            findings.append(warning("kernels", f"the kernel of {check.kernel} {problem}", remedy))
        else:
            findings.append(
                ok("kernels", f"{check.kernel}: {speed:.1f} times as fast as PyTorch's operators")
            )
    return findings


def assess_rdma(root: Path = Path("/")) -> list[Finding]:
    """Report whether InfiniBand cards reach the GPUs' memory: otherwise the host's halves the bandwidth."""
    if not gpus_on_bus(root) or not any((root / "sys/class/infiniband").glob("*")):
        return []
    if any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        return [ok("gpudirect", "InfiniBand cards reach the GPUs' memory: nvidia_peermem is loaded")]
    if "Open Kernel Module" in read_text_or_empty(root / "proc/driver/nvidia/version"):
        return [ok("gpudirect", "InfiniBand cards may reach the GPUs' memory: the driver has dma-buf")]
    text = "gradients between hosts go through the memory of the host: nvidia_peermem is not loaded"
    remedy = "Run `modprobe nvidia_peermem` on every host. NCCL_DEBUG=INFO then says GDRDMA for each channel."
    return [warning("gpudirect", text, remedy)]


def assess_gpus(state: GpuState) -> list[Finding]:
    """Report the first reason why PyTorch cannot use the GPUs."""
    if not state.on_bus and not state.torch_gpus:
        return [ok("gpu", "none; ranks compute on the CPU")]
    on_bus = f"{state.on_bus} NVIDIA GPU{'s' if state.on_bus > 1 else ''}, but"
    if not state.driver:
        text = f"{on_bus} no driver responds"
        remedy = "Install NVIDIA's driver; start a container with the GPUs (--gpus all)."
    elif not state.torch_cuda:
        text = f"{on_bus} torch is built without CUDA"
        remedy = "Point pip at an index with torch's CUDA build, remove .venv, and run ./tools/setup again."
    elif state.driver_cuda and state.driver_cuda // 1000 < int(state.torch_cuda.partition(".")[0]):
        newest = f"{state.driver_cuda // 1000}.{state.driver_cuda % 1000 // 10}"
        text = f"driver {state.driver} supports CUDA up to {newest}, torch is built with {state.torch_cuda}"
        oldest = _DRIVERS.get(int(state.torch_cuda.partition(".")[0]))
        wanted = f"driver {oldest} or newer" if oldest else f"a driver for CUDA {state.torch_cuda}"
        remedy = f"Install {wanted}, or a torch built with {newest}."
    elif not state.torch_gpus:
        value = state.cuda_visible_devices
        text = f"{on_bus} torch sees none{'' if value is None else f' (CUDA_VISIBLE_DEVICES={value!r})'}"
        remedy = "Remove CUDA_VISIBLE_DEVICES from the job, or see what `nvidia-smi` reports."
    else:
        return [ok("gpu", f"{state.torch_gpus} x {state.names}, driver {state.driver}")]
    return [failure("gpu", text, remedy)]


def _read_state() -> GpuState:
    import torch

    driver, driver_cuda = driver_versions()
    count = torch.cuda.device_count()
    names = dict.fromkeys(torch.cuda.get_device_name(number) for number in range(count))
    return GpuState(
        on_bus=len(gpus_on_bus()),
        driver=driver,
        driver_cuda=driver_cuda,
        torch_cuda=torch.version.cuda or "",
        torch_gpus=count,
        names=", ".join(names),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
