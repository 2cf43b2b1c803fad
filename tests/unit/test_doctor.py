"""What the checks of the doctor find on machines unlike this one, and the report of several ranks."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_volo.build_horovod import BUILD_SCRIPT
from horovod_volo.cluster.collectives import load_horovod
from horovod_volo.cluster.launch_env import LaunchEnv
from horovod_volo.cluster.topology import gpus_on_bus
from horovod_volo.cluster.world import World
from horovod_volo.core.environment import code_hashes
from horovod_volo.core.errors import UserError
from horovod_volo.doctor import between_ranks, gpus, host, network
from horovod_volo.doctor.installation import compare_mpi, compare_release
from horovod_volo.doctor.report import (
    Finding,
    build_report,
    failure,
    format_report,
    ok,
    run_check,
    warning,
)

MIB, GIB = 2**20, 2**30
OPEN_MPI = "Open MPI v4.1.4"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def assert_found(found: Finding, level: str, text: str = "") -> None:
    assert found.level == level
    assert text in found.text
    assert bool(found.remedy) == (level != "ok")


# The report


def report(*by_rank: list[Finding], ranks: int = 0) -> dict:
    hosts = [f"h{rank // 2}" for rank in range(len(by_rank))]
    return build_report(LaunchEnv("mpirun", 0, ranks or len(by_rank), 0, 2), list(by_rank), hosts, "MPI")


def test_the_report_has_failures_first_and_the_ranks_of_each_finding() -> None:
    slow = warning("is slow " + "very " * 40, "Buy another.", subject="disk")
    down = failure("is down", "Plug it in.", subject="network")
    there, two = (ok(text, subject="gpu") for text in ("1", "2"))
    made = report([there, slow, slow], [two, slow], [there, slow, down])
    assert [(one["level"], one["subject"], one["ranks"]) for one in made["findings"]] == [
        ("failure", "network", [2]),
        ("warning", "disk", [0, 1, 2]),
        ("ok", "gpu", [0, 2]),
        ("ok", "gpu", [1]),
    ]
    assert made["findings"][0]["remedy"] == "Plug it in."
    assert {name: value for name, value in made.items() if name != "findings"} == {
        "failures": 1,
        "warnings": 1,
        "ranks": 3,
        "hosts": ["h0", "h0", "h1"],
        "launcher": "mpirun",
        "controller": "MPI",
    }
    lines = format_report(made).splitlines()
    assert lines[0] == "3 ranks on 2 hosts, mpirun (MPI)"
    assert lines[2:4] == ["FAILURE  network  is down (ranks 2 of 3)", f"{'':<18}-> Plug it in."]
    assert lines[-1] == "1 failure, 1 warning."
    assert max(map(len, lines)) <= 110
    assert format_report(report([there], ranks=4)).startswith("only rank 0 of 4 reported")


def test_an_exception_in_a_check_is_a_failure() -> None:
    def user_error() -> list:
        raise UserError("It is missing. Install it. Then run again.")

    def broken() -> list:
        raise ImportError("libsomething.so: not found\nand more")

    assert run_check("thing", lambda: [ok("there")]) == [ok("there", subject="thing")]
    (found,) = run_check("thing", user_error)
    assert found == failure("It is missing", "Install it. Then run again.", subject="thing")
    (found,) = run_check("thing", broken)
    assert_found(found, "failure", "ImportError: libsomething.so: not found")


# This rank: installation and GPUs


@pytest.mark.parametrize(
    ("installed", "old"), [("2.8.0a0+cuda", 0), ("2.10.1", 0), ("2.7.1", 1), ("2.8rc1", 0)]
)
def test_a_package_older_than_the_requirements_is_a_warning(installed: str, old: int) -> None:
    found = list(compare_release("torch", installed))
    assert [one.level for one in found] == ["warning"] * old


@pytest.mark.parametrize(
    ("library", "program", "level", "text"),
    [
        (OPEN_MPI, "mpirun (Open MPI) 4.0.2", "ok", OPEN_MPI),
        (OPEN_MPI, "mpirun (Open MPI) 5.0.1", "warning", "4.1.4"),
        (OPEN_MPI, "HYDRA build details: Version: 4.0.2", "warning", "may not find each other"),
        (OPEN_MPI, "", "warning", "is not on PATH"),
        ("", "mpirun (Open MPI) 4.1.4", "ok", "without MPI"),
    ],
)
def test_another_mpi_is_a_warning(library: str, program: str, level: str, text: str) -> None:
    assert_found(compare_mpi(library, program), level, text)


@pytest.mark.parametrize(
    ("on_bus", "driver", "driver_cuda", "torch_cuda", "names", "level", "text"),
    [
        (8, "550.54", 12040, "12.8", 8 * ["H100"], "ok", "8 x H100, driver 550.54"),
        (0, "", 0, "12.8", [], "ok", "compute on the CPU"),
        (0, "550.54", 12040, "12.8", ["A100"], "ok", "1 x A100"),
        (2, "", 0, "12.8", [], "failure", "no driver"),
        (1, "550.54", 12040, "", [], "failure", "torch is built without CUDA"),
        (1, "450.80", 11000, "12.8", [], "failure", "driver 450.80 supports CUDA up to 11.0"),
        (1, "550.54", 12040, "12.8", [], "failure", "torch sees none (CUDA_VISIBLE_DEVICES='')"),
    ],
)
def test_the_first_cause_of_unusable_gpus_is_reported(
    on_bus, driver, driver_cuda, torch_cuda, names, level, text, monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert_found(gpus.assess_gpus(on_bus, driver, driver_cuda, torch_cuda, names), level, text)


def test_an_old_driver_is_named_with_the_oldest_that_is_new_enough() -> None:
    remedy = gpus.assess_gpus(1, "570.86", 12080, "13.0", []).remedy
    assert "driver 580" in remedy
    assert "12.8" in remedy


@pytest.mark.parametrize(
    ("file", "text", "level"),
    [
        ("sys/module/nvidia_peermem/refcnt", "0", "ok"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module", "ok"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel", "warning"),
    ],
)
def test_whether_network_cards_reach_the_memory_of_gpus(file: str, text: str, level: str, tmp_path) -> None:
    assert list(gpus.check_rdma(tmp_path)) == []
    gpu, card = "sys/bus/pci/devices/0000:07:00.0", "sys/class/infiniband/mlx5_0/node_type"
    write(tmp_path, {f"{gpu}/vendor": "0x10de", f"{gpu}/class": "0x030200", card: "1", file: text})
    (found,) = gpus.check_rdma(tmp_path)
    assert found.level == level
    assert ("modprobe nvidia_peermem" in found.remedy) == (level == "warning")


def test_gpus_are_counted_on_the_bus(tmp_path: Path) -> None:
    for address, vendor, kind in (
        ("0000:07:00.0", "0x10de", "0x030200"),
        ("0000:0f:00.0", "0x10de", "0x030000"),
        ("0000:c4:00.0", "0x10de", "0x068000"),  # a switch between GPUs
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        folder = f"sys/bus/pci/devices/{address}"
        write(tmp_path, {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"})
    assert gpus_on_bus(tmp_path) == {"0000:07:00.0", "0000:0f:00.0"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "false"}, "No PyTorch in false"),
        ({}, "HOROVOD_WITHOUT_MPI=1"),
        ({"HOROVOD_WITHOUT_MPI": "1"}, "No g++ found"),
        ({"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}, "is a CPU build"),
    ],
    ids=["no PyTorch", "no MPI", "no compiler", "no CUDA"],
)
def test_the_build_of_horovod_names_what_is_missing(variables: dict, message: str, tmp_path: Path) -> None:
    """PATH has a Python with a CPU build of PyTorch, and nothing that builds."""
    for program in ("bash", "sed", "uname", "cat", "false"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho cpython-311 2.13.0 none\n")
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHON": str(python)} | variables
    command = [str(shutil.which("bash")), str(BUILD_SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


@pytest.mark.filterwarnings("ignore:sys.meta_path is empty:ImportWarning")  # this test empties it
def test_a_missing_horovod_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("path", "meta_path", "path_hooks"):
        monkeypatch.setattr(sys, name, [])
    with pytest.raises(UserError, match=r"not installed in this Python.*horovod-volo build_horovod"):
        load_horovod()


# This rank: host and network


@pytest.mark.parametrize(("gib", "level"), [(3.9, "failure"), (4, "warning"), (15.9, "warning"), (16, "ok")])
def test_memory_is_divided_among_ranks(gib: float, level: str, monkeypatch) -> None:
    monkeypatch.setattr(host, "free_memory", lambda root: gib * GIB)
    (found,) = host.check_memory(4)
    assert_found(found, level)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n"}
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/self/cgroup": "0::/\n"}, 8_192_000),
        (  # the lowest of nested groups, with the cache that the kernel can evict
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{GROUP}/job/memory.max": "1000000\n",
                f"{GROUP}/job/memory.current": "400000\n",
                f"{GROUP}/job/memory.stat": "anon 1\ninactive_file 100000\n",
                f"{GROUP}/job/step/memory.max": "max\n",
                f"{GROUP}/job/step/memory.current": "7\n",
                f"{GROUP}/job/step/memory.stat": "inactive_file 0\n",
            },
            700_000,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "9:cpu:/elsewhere\n4:memory:/job\n0::/\n",
                f"{GROUP}/memory/job/memory.limit_in_bytes": "3000000\n",
                f"{GROUP}/memory/job/memory.usage_in_bytes": "1000000\n",
                f"{GROUP}/memory/job/memory.stat": "cache 1\n",
            },
            2_000_000,
        ),
    ],
    ids=["none", "version 2", "version 1"],
)
def test_memory_is_limited_by_control_groups(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert host.free_memory(write(tmp_path, MEMINFO | files)) == free


@pytest.mark.parametrize(
    ("mib", "on_gpu", "level"),
    [
        (64, False, "ok"),
        (39, False, "failure"),
        (64, True, "failure"),  # the default of containers
        (256, True, "ok"),
    ],
)
def test_shared_memory_must_hold_all_ranks_of_the_host(
    mib: int, on_gpu: bool, level: str, monkeypatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=mib, f_frsize=MIB))
    (found,) = host.check_shared_memory(8, on_gpu)
    assert_found(found, level)


def test_missing_shared_memory_is_a_failure(tmp_path: Path) -> None:
    (found,) = host.check_shared_memory(1, False, tmp_path / "shm")
    assert_found(found, "failure", "missing")


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "level"),
    [
        (1024, 4096, 8, "ok"),
        (1024, 4096, 200, "warning"),
        (1024, 4096, 256, "failure"),
        (64, 64, 1, "failure"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10**6, "ok"),
    ],
)
def test_the_open_files_that_are_needed_grow_with_the_ranks(soft, hard, ranks, level, monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    (found,) = host.check_open_files(ranks)
    assert_found(found, level)
    assert ("hard limit, 64," in found.remedy) == (hard == 64)


def test_leftovers_are_older_than_files_in_use_and_still_there(tmp_path: Path, monkeypatch) -> None:
    ages = {"torch_left": 300, "torch_used": 200, "torch_later": 100, "torch_removed": 300, "mine": 300}
    for name, age in ages.items():
        (tmp_path / name).touch()
        modified = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (modified, modified))
    lstat = Path.lstat

    def remove_first(path: Path) -> os.stat_result:
        if path.name == "torch_removed":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", remove_first)
    with (tmp_path / "torch_used").open():
        (found,) = host.check_leftovers(tmp_path)
    assert_found(found, "warning", "1 file of PyTorch")
    subprocess.run(found.remedy, shell=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "torch_later", "torch_used"]


def test_the_interfaces_of_this_host_are_listed() -> None:
    interfaces = network.list_interfaces()
    assert {one.name for one in interfaces} == {name for _, name in socket.if_nameindex()} - {"lo"}
    for one in interfaces:
        if one.up and one.address:
            with socket.socket() as listening:
                listening.bind((one.address, 0))  # fails for an address of another host


SECRETS = {"WANDB_API_KEY": "it's one", "GITHUB_TOKEN": "two three", "db_password": "HF_TOKEN=four"}
HARMLESS = {"TOKENIZERS_PARALLELISM": "0", "MONKEYS": "5", "SSH_KEY_FILE": "/id", "EMPTY_SECRET": ""}


def test_secrets_are_found_on_the_command_lines_of_horovodrun() -> None:
    variables = shlex.join(f"{name}={value}" for name, value in (SECRETS | HARMLESS).items())
    local = f"cd /tmp > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=b HOROVOD_RANK=1 {variables} python x"
    for command in (["bash", "-c", local], ["/bin/sh", "-c", f"ssh b {shlex.quote(local)}"]):
        assert network.secret_names("\0".join(command).encode()) == set(SECRETS)
    assert network.secret_names(b"python\0--token\0API_KEY=5\0") == set()


@pytest.mark.parametrize(("address", "warnings"), [("", 1), ("127.0.0.1", 0)])
def test_a_rendezvous_server_on_all_interfaces_is_open(address: str, warnings: int) -> None:
    with socket.create_server((address, 0)) as server:
        variables = {"ADDR": "127.0.0.1", "PORT": str(server.getsockname()[1])}
        environment = {f"HOROVOD_GLOO_RENDEZVOUS_{name}": value for name, value in variables.items()}
        assert len(list(network.check_rendezvous(environment))) == warnings
    assert list(network.check_rendezvous(environment)) == []  # it has ended
    assert list(network.check_rendezvous({})) == []


# Between ranks


def test_differences_from_rank_0_are_named() -> None:
    first = {"python": "3.11.7", "torch": "2.13.0", "timm": "1.0.31"}
    assert between_ranks.compare(first, first, "").level == "ok"
    found = between_ranks.compare(first | {"torch": "2.12.0"}, first, "Install it.")
    assert found == failure("torch is 2.12.0, on rank 0 2.13.0", "Install it.")
    assert between_ranks.compare({}, {"NCCL_ALGO": "Tree"}, "").text == "NCCL_ALGO is missing, on rank 0 Tree"
    many = between_ranks.compare(dict.fromkeys("abcde", "1"), dict.fromkeys("abcde", "2"), "").text
    assert many.endswith("c is 1, on rank 0 2; and 2 more")


def test_code_and_recipes_are_hashed(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "same", "deep/b.toml": "same", "deep/notes.txt": "same"})
    before = code_hashes(tmp_path)
    assert list(before) == ["a.py", "deep/b.toml"]
    changed = code_hashes(write(tmp_path, {"deep/b.toml": "sane"}))
    assert [changed[name] == before[name] for name in before] == [True, False]


@pytest.mark.parametrize(
    ("ahead", "level", "text"),
    [(0.9, "ok", ""), (1.2, "warning", "1.2 s ahead"), (-90.0, "warning", "90.0 s behind")],
)
def test_another_clock_is_a_warning(ahead: float, level: str, text: str) -> None:
    assert_found(between_ranks.assess_clock(ahead), level, text)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "correct", "line", "level", "text"),
    [
        (0.004, 2.4e8, True, 0, "ok", "4.0 ms for 4 bytes, 240 MB/s for 16 MiB"),
        (0.004, 1.1e8, True, 1000, "ok", "110 MB/s"),
        (0.004, 1.1e8, True, 100_000, "warning", "at least 625 MB/s"),
        (0.004, 2.0e7, True, 0, "warning", "at least 50 MB/s"),
        (0.031, 2.4e8, True, 0, "warning", "at most 30 ms"),
        (0.004, 2.4e8, False, 0, "failure", "wrong"),
    ],
)
def test_allreduce_is_assessed_by_interface_and_cycle_time(
    latency, bandwidth, correct, line, level, text, monkeypatch
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    (found,) = between_ranks.assess_allreduce(latency, bandwidth, correct, line, "CPUs")
    assert_found(found, level, text)


@pytest.mark.parametrize(
    ("written", "visible", "level"), [(0.9, 0.9, "ok"), (1.5, 0.0, "warning"), (0.1, 1.5, "warning")]
)
def test_a_slow_folder_is_a_warning(written: float, visible: float, level: str) -> None:
    assert_found(between_ranks.assess_folder(Path("runs"), written, visible), level)


def test_the_check_of_a_folder_leaves_it_unchanged(tmp_path: Path) -> None:
    write(tmp_path, {"file": "not a folder"})
    for name, level in (("new/runs", "ok"), (".", "ok"), ("file/runs", "failure")):
        (found,) = between_ranks.check_shared_folder(World.single(), tmp_path / name)
        assert_found(found, level, "cannot write there" if level == "failure" else "")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
