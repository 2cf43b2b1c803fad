"""What the checks of the doctor find on machines unlike this one, and the report of several ranks."""

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from horovod_volo.build_horovod import BUILD_SCRIPT
from horovod_volo.cluster.launch_env import LaunchEnv
from horovod_volo.cluster.missing_gpu import first_reason
from horovod_volo.cluster.topology import gpus_on_bus
from horovod_volo.cluster.world import World
from horovod_volo.core import environment
from horovod_volo.doctor import host
from horovod_volo.doctor.between_ranks import assess_allreduce, check_shared_folder, compare
from horovod_volo.doctor.installation import assess_gpus, check_rdma, compare_mpi
from horovod_volo.doctor.report import Finding, build_report, failure, format_report, ok, run_check, warning

MIB, GIB = 2**20, 2**30
OPEN_MPI, CUDA_12 = "Open MPI v4.1.4", ("550.54", 12040, "12.8")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_the_report_has_failures_first_and_the_ranks_of_each_finding() -> None:
    slow = warning("is slow " + "very " * 40, "Buy another.", subject="disk")
    down = failure("is down", "Plug it in.", subject="network")
    there, two = (ok(text, subject="gpu") for text in ("1", "2"))
    by_rank = [[there, slow, slow], [two, slow], [there, slow, down]]
    made = build_report(LaunchEnv("mpirun", 0, 3, 0, 2), by_rank, ["h0", "h0", "h1"], "MPI")
    assert [(one["level"], one["subject"], one["ranks"]) for one in made["findings"]] == [
        ("failure", "network", [2]),
        ("warning", "disk", [0, 1, 2]),
        ("ok", "gpu", [0, 2]),
        ("ok", "gpu", [1]),
    ]
    assert (made["failures"], made["warnings"], made["ranks"]) == (1, 1, 3)
    assert "FAILURE  network  is down (ranks 2 of 3)" in format_report(made).splitlines()
    alone = build_report(LaunchEnv("mpirun", 0, 4, 0, 2), [[there]], ["h0"], "MPI")
    assert format_report(alone).startswith("only rank 0 of 4 reported")


def test_an_exception_in_a_check_is_a_failure() -> None:
    def broken() -> list:
        raise ImportError("libsomething.so: not found\nand more")

    (found,) = run_check("thing", broken)
    assert found.level == "failure"
    assert "ImportError: libsomething.so: not found" in found.text


def finding_of(found: Finding | Iterable[Finding]) -> Finding:
    (one,) = [found] if isinstance(found, Finding) else found
    return one


@pytest.mark.parametrize(
    ("check", "level", "text"),
    [
        (lambda: compare_mpi(OPEN_MPI, "mpirun (Open MPI) 4.0.2"), "ok", OPEN_MPI),
        (lambda: compare_mpi(OPEN_MPI, "mpirun (Open MPI) 5.0.1"), "warning", "4.1.4"),
        (lambda: compare_mpi(OPEN_MPI, ""), "warning", "is not on PATH"),
        (lambda: compare_mpi("", "mpirun (Open MPI) 4.1.4"), "ok", "without MPI"),
        (lambda: assess_gpus(8, *CUDA_12, 8 * ["H100"]), "ok", "8 x H100, driver 550.54"),
        (lambda: assess_gpus(0, "", 0, "12.8", []), "ok", "compute on the CPU"),
        (lambda: assess_gpus(2, "", 0, "12.8", []), "failure", "no driver"),
        (lambda: assess_gpus(1, "550.54", 12040, "", []), "failure", "torch is built without CUDA"),
        (lambda: assess_gpus(1, "450.80", 11000, "12.8", []), "failure", "supports CUDA up to 11.0"),
        (lambda: assess_gpus(1, *CUDA_12, []), "failure", "torch sees none (CUDA_VISIBLE_DEVICES='')"),
        (lambda: assess_allreduce(0.004, 2.4e8, True, 0, ""), "ok", "4.0 ms for 4 bytes, 240 MB/s for 16"),
        (lambda: assess_allreduce(0.004, 1.1e8, True, 100_000, ""), "warning", "at least 625 MB/s"),
        (lambda: assess_allreduce(0.004, 2.0e7, True, 0, ""), "warning", "at least 50 MB/s"),
        (lambda: assess_allreduce(0.031, 2.4e8, True, 0, ""), "warning", "at most 30 ms"),
        (lambda: assess_allreduce(0.004, 2.4e8, False, 0, ""), "failure", "wrong"),
        (lambda: host.check_shared_memory(1, False, Path("/nowhere")), "failure", "missing"),
        (lambda: compare({"a": "1"}, {"a": "1"}, "Do it."), "ok", ""),
        (lambda: compare({"b": "2"}, {"b": "3"}, "Do it."), "failure", "b is 2, on rank 0 3"),
        (lambda: compare(dict.fromkeys("abcde", "1"), {}, "Do it."), "failure", "; and 2 more"),
    ],
)
def test_what_is_measured_is_assessed(check: Callable, level: str, text: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    found = finding_of(check())
    assert (found.level, bool(found.remedy)) == (level, level != "ok")
    assert text in found.text


def test_a_slurm_job_without_gpus_is_told_to_request_some(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert all("--gpus-per-node" in first_reason(*host)[1] for host in ((0, "", 0, ""), (8, *CUDA_12)))
    monkeypatch.setenv("SLURM_JOB_GPUS", "0")
    assert "--gpus-per-node" not in first_reason(8, *CUDA_12)[1]


@pytest.mark.parametrize(
    ("gib", "mib", "on_gpu", "soft", "ranks", "levels"),
    [  # of memory, /dev/shm and open files; eight ranks have 5 MiB each there, on GPUs 32
        (3.9, 39, False, 64, 1, ["failure", "failure", "failure"]),
        (4, 64, False, 1024, 200, ["warning", "ok", "warning"]),
        (15.9, 64, True, 1024, 256, ["warning", "failure", "failure"]),
        (16, 256, True, 1024, 8, ["ok", "ok", "ok"]),
        (16, 256, True, resource.RLIM_INFINITY, 10**6, ["ok", "ok", "ok"]),
    ],
)
def test_ranks_share_the_resources_of_a_host(gib, mib, on_gpu, soft, ranks, levels, monkeypatch) -> None:
    monkeypatch.setattr(host, "free_memory", lambda root: gib * GIB)
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=mib, f_frsize=MIB))
    hard = max(soft, 64)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    checks = host.check_memory(4), host.check_shared_memory(8, on_gpu), host.check_open_files(ranks)
    found = list(map(finding_of, checks))
    assert [one.level for one in found] == levels
    assert ("hard limit, 64," in found[2].remedy) == (soft == 64)


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
)
def test_memory_is_limited_by_control_groups(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert host.free_memory(write(tmp_path, MEMINFO | files)) == free


@pytest.mark.parametrize(
    ("file", "text", "level"),
    [
        ("sys/module/nvidia_peermem/refcnt", "0", "ok"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module", "ok"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel", "warning"),
    ],
)
def test_whether_network_cards_reach_the_memory_of_gpus(file: str, text: str, level: str, tmp_path) -> None:
    assert list(check_rdma(tmp_path)) == []
    devices = {"07:00.0": "0x10de 0x030200", "c4:00.0": "0x10de 0x068000", "00:02.0": "0x8086 0x030000"}
    for address, words in devices.items():  # a GPU, a switch between GPUs and another vendor's
        folder, (vendor, kind) = f"sys/bus/pci/devices/0000:{address}", words.split()
        write(tmp_path, {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"})
    assert gpus_on_bus(tmp_path) == {"0000:07:00.0"}
    write(tmp_path, {"sys/class/infiniband/mlx5_0/node_type": "1", file: text})
    assert finding_of(check_rdma(tmp_path)).level == level


@pytest.mark.parametrize(
    ("built", "flags", "status", "message"),
    [
        ("", "", 1, "No PyTorch in"),
        ("2.13.0+cpu none", "", 1, "build without MPI: --without-mpi"),
        ("2.13.0+cpu none", "--without-mpi", 1, "No g++ found"),
        ("2.13.0+cpu none", "--nccl", 1, "is a CPU build"),
        ("2.13.0 13.0", "", 1, "    --nccl --cc 80,90   for nodes with GPUs"),
        ("2.13.0 13.0", "--cpu --cc=80", 2, "give one of the two"),
        ("2.13.0 13.0", "--cc 8.0", 2, "takes compute capabilities such as 80,90, not 8.0"),
        ("99.0 none", "", 1, "./tools/try_torch 99.0 /path/to/new_folder --cpu"),
    ],
)
def test_the_build_of_horovod_names_what_is_missing(built, flags, status, message, tmp_path: Path) -> None:
    """PATH has a Python with such a PyTorch, and nothing that builds."""
    for program in ("bash", "sed", "sort", "tail", "uname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho cpython-311 {built} /headers\n" if built else "#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHON": str(python)}
    command = [str(shutil.which("bash")), str(BUILD_SCRIPT), *flags.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr


def test_a_compiler_that_is_too_old_for_pytorch_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "old"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -std=c++14\n')
    compiler.chmod(0o755)
    environment = os.environ | {"PYTHON": sys.executable, "CXX": str(compiler)}
    command = ["bash", str(BUILD_SCRIPT), "--cpu", "--without-mpi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "#error C++" in done.stderr
    assert f"is too old for PyTorch {torch.__version__}" in done.stderr


SECRETS = {"WANDB_API_KEY": "it's one", "GITHUB_TOKEN": "two three", "db_password": "HF_TOKEN=four"}
HARMLESS = {"TOKENIZERS_PARALLELISM": "0", "MONKEYS": "5", "SSH_KEY_FILE": "/id", "EMPTY_SECRET": ""}


def test_secrets_are_found_on_the_command_lines_of_horovodrun() -> None:
    variables = shlex.join(f"{name}={value}" for name, value in (SECRETS | HARMLESS).items())
    local = f"cd /tmp > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=b HOROVOD_RANK=1 {variables} python x"
    for command in (["bash", "-c", local], ["/bin/sh", "-c", f"ssh b {shlex.quote(local)}"]):
        assert host.secret_names("\0".join(command).encode()) == set(SECRETS)
    assert host.secret_names(b"python\0--token\0API_KEY=5\0") == set()


def test_the_check_of_a_folder_leaves_it_unchanged(tmp_path: Path) -> None:
    write(tmp_path, {"file": "not a folder"})
    for name, level in (("new/runs", "ok"), (".", "ok"), ("file/runs", "failure")):
        found = finding_of(check_shared_folder(World.single(), tmp_path / name))
        assert found.level == level
        assert ("cannot write there" in found.text) == (level == "failure")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_change_anywhere_in_the_package_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "horovod_volo"
    package.mkdir()
    (package / "volo.py").write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr(environment, "PACKAGE", package)
    commit = environment.code_commit()
    assert len(commit) == 12
    (tmp_path / "notes.txt").write_text("not of the package, and untracked")
    assert environment.code_commit() == commit
    (package / "volo.py").write_text("changed = True\n")
    assert environment.code_commit() == f"{commit}+changes"
    shutil.rmtree(tmp_path / ".git")
    assert environment.code_commit() == "not a git checkout"
