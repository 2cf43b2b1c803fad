"""The doctor reports injected faults with their remedies, and warns of secrets, servers and leftovers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from horovod_volo.doctor.exposure import check_exposure, secret_names
from tests.cluster.conftest import lacking
from tests.faults.doctor_runs import HARMLESS, SECRETS, examine
from tests.ranks.launching import environment

PACKAGE = Path(__file__).parents[2] / "horovod_volo"


# Killed with its resource tracker, which would remove the semaphore.
LEAVE_SEMAPHORE = """
import multiprocessing, multiprocessing.resource_tracker as tracker, os, signal
lock = multiprocessing.get_context("spawn").Lock()
os.kill(tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVE_SEGMENTS = """
import os, signal, time
import horovod.torch as hvd
hvd.init()
others = [os.getppid(), *hvd.allgather_object(os.getpid())]
if hvd.rank() == 0:
    for other in [*(pid for pid in others if pid != os.getpid()), os.getpid()]:
        os.kill(other, signal.SIGKILL)
time.sleep(60)
"""


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
    """Under horovodrun, secrets on the command line and an open rendezvous server are warnings."""
    result = examine(tmp_path, ranks=ranks, start_with=start_with, **SECRETS, **HARMLESS)
    assert result.status == 0, result.output
    for value in ("it's one", "two three", "four"):
        assert value not in result.output + str(result.record)
    if start_with == "gloo":
        found, server = result.only("environment", "warning"), result.only("rendezvous", "warning")
        names = set(found["text"].rpartition(": ")[2].split(", "))
        assert set(SECRETS) <= names
        assert not set(HARMLESS) & names
        assert "jobs/horovodrun.sh" in found["remedy"]
        assert "listens on all interfaces, without authentication" in server["text"]
        assert "mpirun" in server["remedy"]
        assert found["ranks"] == server["ranks"] == [0, 1]
    else:
        assert result.of("environment") == result.of("rendezvous") == []
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


def doctor(folder: Path, *flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_volo.doctor", *flags]
    variables = environment(**extra)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def test_help_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    began = time.monotonic()
    done = doctor(tmp_path, "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "--shared" in done.stdout
    assert time.monotonic() - began < 5


def test_a_mistake_on_the_command_line_is_printed_once(tmp_path):
    done = doctor(tmp_path, "--binding", "sideways")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert "sideways" in done.stderr


def test_a_horovod_without_pytorch_is_reported(tmp_path, horovod_without_pytorch):
    """The JSON on stdout is valid, although Horovod prints to stdout too."""
    done = doctor(tmp_path, "--json", "-", PYTHONPATH=horovod_without_pytorch)
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


def test_a_command_line_over_ssh_is_understood() -> None:
    variables = shlex.join(f"{name}={value}" for name, value in (SECRETS | HARMLESS).items())
    inner = shlex.quote(
        f"cd /tmp > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=b HOROVOD_RANK=1 {variables} python x"
    )
    assert secret_names(f"bash\0-c\0{inner[1:-1]}\0".encode()) == secret_names(
        f"/bin/sh\0-c\0ssh b {inner}\0".encode()
    )
    assert secret_names(b"python\0--token\0API_KEY=5\0") == set()


def test_a_server_on_one_interface_is_not_open(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    table = "  sl  local_address rem_address   st\n   0: {}:C373 00000000:0000 {} 0\n"
    variables = {"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "50035"}
    variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    for address, state, warnings in (
        ("00000000", "0A", 1),
        ("0100007F", "0A", 0),
        ("00000000", "01", 0),
        ("0" * 32, "0A", 1),
    ):
        file = "tcp6" if len(address) == 32 else "tcp"
        (tmp_path / "proc/net" / file).write_text(table.format(address, state))
        found = check_exposure(variables, tmp_path, pid=1)
        assert len(found) == warnings
        assert all("unpickle what they are sent" in each.text for each in found)
        assert all("a trusted network only: set NETWORK_INTERFACE" in each.remedy for each in found)
    elsewhere = variables | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.77"}
    assert check_exposure(elsewhere, tmp_path, pid=1) == []


def test_files_that_killed_processes_left_are_named_with_their_removal(tmp_path: Path, mounts: None) -> None:
    (tmp_path / "semaphore.py").write_text(LEAVE_SEMAPHORE)
    (tmp_path / "segments.py").write_text(LEAVE_SEGMENTS)
    python = shlex.quote(sys.executable)
    # What a living process uses, and files of other names, are not named.
    live = "import multiprocessing as m, time; lock = m.get_context('spawn').Lock(); time.sleep(100)"
    before = f"""
    mount -t tmpfs none /dev/shm
    {python} {tmp_path}/semaphore.py || true
    mpirun -np 2 --oversubscribe {python} {tmp_path}/segments.py || true
    touch /dev/shm/dataset.tar
    {python} {tmp_path}/semaphore.py & sleep 3
    setsid {python} -c {shlex.quote(live)} & sleep 3
    echo /dev/shm/* > {tmp_path}/before
    """
    removal = f"""
    import json, subprocess
    for finding in json.load(open("{tmp_path}/reported.json"))["findings"]:
        if finding["subject"] == "leftovers":
            subprocess.run(finding["remedy"], shell=True, check=True)
    """
    (tmp_path / "removal.py").write_text(textwrap.dedent(removal))
    after = f"{python} {tmp_path}/removal.py; echo /dev/shm/* > {tmp_path}/after; kill $!"
    result = examine(tmp_path, inside=["unshare", "--mount"], before=before, after=after)
    assert result.status == 0, result.output
    found = [finding["text"].partition(" in ")[0] for finding in result.of("leftovers")]
    assert found == ["2 files of Open MPI", "2 files of Python's multiprocessing"]
    assert {finding["level"] for finding in result.of("leftovers")} == {"warning"}
    files, remaining = ((tmp_path / name).read_text().split() for name in ("before", "after"))
    assert len(files) == 6
    assert [Path(file).name.partition("-")[0] for file in remaining] == ["dataset.tar", "sem.mp"]
