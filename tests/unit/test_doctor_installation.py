"""Combinations of GPUs, drivers and builds that do not work, and an mpirun of another MPI library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_volo.build_horovod import BUILD_SCRIPT
from horovod_volo.cluster.topology import gpus_on_bus
from horovod_volo.doctor.gpus import GpuState, assess_gpus, assess_rdma
from horovod_volo.doctor.installation import compare_mpi

WELL = GpuState(
    on_bus=8, driver="550.54", driver_cuda=12040, torch_cuda="12.8", torch_gpus=8, names="NVIDIA H100"
)
OPEN_MPI = "Open MPI v4.1.4"


@pytest.mark.parametrize(
    ("state", "level", "text"),
    [
        (WELL, "ok", "8 x NVIDIA H100, driver 550.54"),
        (GpuState(on_bus=0), "ok", "compute on the CPU"),
        (GpuState(on_bus=0, torch_cuda="12.8"), "ok", "compute on the CPU"),
        (GpuState(on_bus=2, torch_cuda="12.8"), "failure", "no driver responds"),
        (
            GpuState(on_bus=1, driver="550.54", driver_cuda=12040),
            "failure",
            "1 NVIDIA GPU, but torch is built without",
        ),
        (
            GpuState(on_bus=1, driver="450.80", driver_cuda=11000, torch_cuda="12.8"),
            "failure",
            "driver 450.80 supports CUDA up to 11.0, torch is built with 12.8",
        ),
        (
            GpuState(
                on_bus=1, driver="550.54", driver_cuda=12040, torch_cuda="12.8", cuda_visible_devices=""
            ),
            "failure",
            "torch sees none (CUDA_VISIBLE_DEVICES='')",
        ),
        (
            GpuState(on_bus=0, driver="550.54", torch_cuda="12.8", torch_gpus=1, names="A100"),
            "ok",
            "1 x A100",
        ),
    ],
    ids=["well", "none", "CUDA for none", "no driver", "CPU build", "old driver", "hidden", "not on the bus"],
)
def test_the_first_cause_is_reported(state: GpuState, level: str, text: str) -> None:
    (found,) = assess_gpus(state)
    assert found.level == level
    assert text in found.text
    assert bool(found.remedy) == (level != "ok")


def test_an_old_driver_is_named_with_the_oldest_that_is_new_enough() -> None:
    (found,) = assess_gpus(GpuState(on_bus=1, driver="570.86", driver_cuda=12080, torch_cuda="13.0"))
    assert found.remedy == "Install driver 580 or newer, or a torch built with 12.8."


@pytest.mark.parametrize(
    ("files", "level", "text"),
    [
        ({"sys/module/nvidia_peermem/refcnt": "0"}, "ok", "nvidia_peermem is loaded"),
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module"}, "ok", "has dma-buf"),
        (
            {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel"},
            "warning",
            "memory of the host",
        ),
    ],
)
def test_whether_cards_reach_the_memory_of_gpus(
    files: dict[str, str], level: str, text: str, tmp_path: Path
) -> None:
    assert assess_rdma(tmp_path) == []
    on_bus = {"vendor": "0x10de", "class": "0x030200"}
    common = {f"sys/bus/pci/devices/0000:07:00.0/{name}": value for name, value in on_bus.items()}
    for name, value in (common | {"sys/class/infiniband/mlx5_0/node_type": "1"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(value)
    (found,) = assess_rdma(tmp_path)
    assert found.level == level
    assert text in found.text
    assert ("modprobe nvidia_peermem" in found.remedy) == (level == "warning")


def test_gpus_are_counted_on_the_bus(tmp_path: Path) -> None:
    devices = {
        "0000:07:00.0": ("0x10de", "0x030200"),
        "0000:0f:00.0": ("0x10de", "0x030000"),
        "0000:c4:00.0": ("0x10de", "0x068000"),  # a switch between GPUs
        "0000:00:02.0": ("0x8086", "0x030000"),
    }
    for address, (vendor, kind) in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert gpus_on_bus(tmp_path) == {"0000:07:00.0", "0000:0f:00.0"}


@pytest.mark.parametrize(
    ("library", "program", "level", "message"),
    [
        (OPEN_MPI, "mpirun (Open MPI) 4.1.4", "ok", "the one that Horovod is built with"),
        (OPEN_MPI, "mpirun (Open MPI) 4.0.2", "ok", "the one that Horovod is built with"),
        (OPEN_MPI, "mpirun (Open MPI) 5.0.1", "warning", "4.1.4"),
        (OPEN_MPI, "HYDRA build details: Version: 4.0.2", "warning", "may not find each other"),
        (OPEN_MPI, "", "warning", "is not on PATH"),
        ("", "mpirun (Open MPI) 4.1.4", "ok", "without MPI"),
        ("", "", "ok", "none; not needed"),
    ],
)
def test_another_mpi_is_a_warning(library: str, program: str, level: str, message: str) -> None:
    (found,) = compare_mpi(library, program)
    assert found.level == level
    assert message in found.text
    assert bool(found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "false"}, "No PyTorch in false."),
        ({}, "No mpirun found. Install Open MPI, or set HOROVOD_WITHOUT_MPI=1"),
        ({"HOROVOD_WITHOUT_MPI": "1"}, "No g++ found, which builds Horovod."),
        ({"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}, "is a CPU build"),
    ],
    ids=["no PyTorch", "no MPI", "no compiler", "no CUDA"],
)
def test_the_build_of_horovod_names_what_is_missing(
    variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    """PATH has a Python with a CPU build of PyTorch, and nothing that builds."""
    for program in ("bash", "sed", "uname", "cat", "false"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho cpython-311 2.13.0 none\n")
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHON": str(python)} | variables
    command = [str(shutil.which("bash")), str(BUILD_SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.filterwarnings("ignore:sys.meta_path is empty:ImportWarning")  # this test empties it
def test_a_missing_horovod_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_volo.cluster.collectives import read_build
    from horovod_volo.core.errors import UserError

    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path_hooks", [])
    with pytest.raises(UserError, match=r"not installed in this Python.*horovod-volo build_horovod"):
        read_build()
