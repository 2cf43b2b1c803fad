"""The doctor reports injected faults with their remedies, and nothing on a healthy machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.conftest import lacking
from tests.faults.doctor_runs import examine
from tests.ranks.launching import environment

PACKAGE = Path(__file__).parents[2] / "horovod_volo"


@pytest.fixture(scope="module")
def horovod_without_pytorch(tmp_path_factory) -> str:
    """Copy the installed Horovod without its compiled libraries; return the folder."""
    spec = find_spec("horovod")
    assert spec is not None
    folder = tmp_path_factory.mktemp("without_pytorch")
    shutil.copytree(
        Path(spec.origin).parent, folder / "horovod", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return str(folder)


@pytest.fixture
def mounts() -> None:
    """Skip the test if no file system can be mounted, except in CI, where it fails."""
    if reason := lacking("unshare"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.mark.parametrize(("start_with", "ranks"), [("none", 1), ("gloo", 2), ("mpi", 2)])
def test_a_healthy_machine_has_no_failures(tmp_path, start_with, ranks):
    result = examine(tmp_path, ranks=ranks, start_with=start_with)
    assert result.status == 0, result.output
    assert result.at("failure") == []
    assert result.record["failures"] == 0
    assert result.record["ranks"] == len(result.record["hosts"]) == ranks
    assert result.record["controller"] == {"none": "none", "gloo": "gloo", "mpi": "MPI"}[start_with]
    assert all(finding["ranks"] for finding in result.record["findings"])
    merged = {"python", "torch", "horovod", "dali", "timm", "gpu", "/dev/shm", "open files"}
    merged |= {"versions", "code", "settings", "ring"} if ranks > 1 else set()
    for subject in merged:
        assert [finding["ranks"] for finding in result.of(subject)] == [list(range(ranks))], subject
    bound = sorted(rank for finding in result.of("binding") for rank in finding["ranks"])
    assert sorted(set(bound)) == list(range(ranks))
    assert result.only("shared folder", "ok")["text"].startswith("runs: ")
    assert result.output.count("Everything is well.") + result.output.count("Nothing failed; ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reported.json"]


def test_help_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    began = time.monotonic()
    command = [sys.executable, "-m", "horovod_volo.doctor", "--help"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "--shared" in done.stdout
    assert time.monotonic() - began < 5


def test_a_mistake_on_the_command_line_is_printed_once(tmp_path):
    command = [sys.executable, "-m", "horovod_volo.doctor", "--binding", "sideways"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert "sideways" in done.stderr


def test_a_horovod_without_pytorch_is_reported(tmp_path, horovod_without_pytorch):
    """The JSON on stdout is valid, although Horovod prints to stdout too."""
    command = [sys.executable, "-m", "horovod_volo.doctor", "--json", "-"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PYTHONPATH=horovod_without_pytorch),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] == "failure"]
    assert [finding["subject"] for finding in found] == ["ranks", "horovod"]
    assert found[1]["text"] == "Horovod 0.28.1 was built without PyTorch"
    assert "horovod-volo build_horovod" in found[1]["remedy"]


def test_ranks_that_cannot_connect_report_separately(tmp_path, horovod_without_pytorch):
    result = examine(tmp_path, ranks=2, start_with="mpi", PYTHONPATH=horovod_without_pytorch)
    assert result.status == 1
    assert result.only("ranks", "failure")["text"] == "cannot connect without a working Horovod"
    assert result.only("horovod", "failure")["ranks"] == [0]
    assert result.of("/dev/shm")[0]["level"] == "ok"
    assert result.output.count("rank 1: horovod: Horovod 0.28.1 was built without PyTorch. Build it") == 1
    assert "rank 1: ranks" not in result.output


def test_rank_0_reports_that_another_rank_has_failed(tmp_path, horovod_without_pytorch):
    broken = f'if [ "$RANK" = 1 ]; then export PYTHONPATH={horovod_without_pytorch}; fi'
    began = time.monotonic()
    result = examine(tmp_path, ranks=2, start_with="gloo", before=broken)
    assert time.monotonic() - began < 60
    assert result.status == 1
    assert "one of them has failed" in result.only("ranks", "failure")["text"]
    assert result.only("horovod", "ok")["ranks"] == [0]
    assert result.output.count("rank 1: horovod: Horovod 0.28.1 was built without PyTorch. Build it") == 1


def test_a_size_that_horovod_does_not_report_is_a_failure(tmp_path):
    """Open MPI's variables announce two ranks; Horovod uses gloo without its launcher and reports one."""
    variables = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }
    result = examine(tmp_path, **variables)
    assert result.status == 1
    found = result.only("ranks", "failure")
    assert found["text"].startswith("mpirun started 2 ranks, but Horovod sees 1")
    assert "horovodrun --gloo" in found["remedy"]
    assert result.at("failure") == [found]
    assert "only rank 0 of 2 reported" in result.output


def test_another_package_called_apex_and_too_few_open_files_are_reported(tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text('"""A toolkit for the web."""\n')
    result = examine(tmp_path, before="ulimit -n 64", PYTHONPATH=str(tmp_path))
    assert result.status == 1
    assert [finding["subject"] for finding in result.at("failure")] == ["open files"]
    files = result.only("open files", "failure")
    assert files["text"] == "at most 64, but a rank of 1 needs 132"
    assert "ulimit -n 516" in files["remedy"]
    apex = result.only("apex", "warning")
    assert apex["text"] == "the installed package called apex is not NVIDIA's"
    assert "Uninstall it" in apex["remedy"]
    assert result.output.index("FAILURE") < result.output.index("warning") < result.output.index("ok ")


def test_a_read_only_folder_and_small_shared_memory_are_reported(tmp_path, mounts):
    (tmp_path / "results").mkdir()
    machine = Path("/proc/self/ns/mnt").readlink()
    before = (
        f'[ "$(readlink /proc/self/ns/mnt)" != "{machine}" ]; '  # do not mount outside the new namespace
        "mount -t tmpfs -o size=1m tmpfs /dev/shm; "
        f"mount -t tmpfs -o ro tmpfs {tmp_path / 'results'}; MORE='--shared results/runs'"
    )
    result = examine(tmp_path, before=before, inside=("unshare", "-m"))
    assert result.status == 1
    assert {finding["subject"] for finding in result.at("failure")} == {"shared folder", "/dev/shm"}
    folder = result.only("shared folder", "failure")
    assert folder["text"] == "results/runs: cannot write there: Read-only file system"
    assert "--output" in folder["remedy"]
    memory = result.only("/dev/shm", "failure")
    assert memory["text"] == "1 MiB free: MPI may need 5 MiB for each rank of the host"
    assert "--shm-size=1g" in memory["remedy"]


def test_differences_between_ranks_are_reported(tmp_path):
    """One byte of code, one variable of NCCL, and two folders that are not shared."""
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / PACKAGE.name / "models" / "volo.py"
    changed.write_bytes(changed.read_bytes().replace(b"\n", b" ", 1))
    before = (
        f'if [ "$RANK" = 1 ]; then export PYTHONPATH={other} NCCL_ALGO=Tree; fi; MORE="--shared folder_$RANK"'
    )
    result = examine(tmp_path, ranks=2, start_with="gloo", before=before)
    assert result.status == 1
    assert {finding["subject"] for finding in result.at("failure")} == {"code", "settings", "shared folder"}
    code = result.only("code", "failure")
    assert code["text"] == "differs from rank 0's: models/volo.py"
    assert code["ranks"] == [1]
    assert "same commit" in code["remedy"]
    settings = result.only("settings", "failure")
    assert settings["text"] == "NCCL_ALGO is Tree, on rank 0 not set"
    assert settings["ranks"] == [1]
    assert "(rank 1 of 2)" in result.output
    failures = [finding for finding in result.of("shared folder") if finding["level"] == "failure"]
    assert [finding["ranks"] for finding in failures] == [[0], [1]]
    assert failures[0]["text"].startswith("folder_0: is not shared: the files of rank 1 ")
    assert failures[1]["text"].startswith("folder_1: is not shared: the files of rank 0 ")
    assert all("--output" in finding["remedy"] for finding in failures)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "reported.json"]
