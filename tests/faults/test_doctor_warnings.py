"""The doctor warns of secrets on command lines, an open rendezvous server and leftovers in shared memory."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from horovod_volo.doctor.exposure import check_exposure, secret_names
from tests.cluster.conftest import lacking
from tests.faults.doctor_runs import examine

SECRETS = {"WANDB_API_KEY": "it's one", "GITHUB_TOKEN": "two three", "db_password": "HF_TOKEN=four"}
HARMLESS = {"TOKENIZERS_PARALLELISM": "0", "MONKEYS": "5", "SSH_KEY_FILE": "/id", "EMPTY_SECRET": ""}

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


def test_horovodrun_shows_secrets_and_an_open_server(tmp_path: Path) -> None:
    result = examine(tmp_path, ranks=2, start_with="gloo", **SECRETS, **HARMLESS)
    assert result.status == 0, result.output
    found = result.only("environment", "warning")
    names = found["text"].rpartition(": ")[2].split(", ")
    assert set(SECRETS) <= set(names)
    assert not set(HARMLESS) & set(names)
    assert "jobs/horovodrun.sh" in found["remedy"]
    assert found["ranks"] == [0, 1]
    for value in ("it's one", "two three", "four"):
        assert value not in result.output + str(result.record)
    server = result.only("rendezvous", "warning")
    assert "listens on all interfaces, without authentication" in server["text"]
    assert "mpirun" in server["remedy"]
    assert server["ranks"] == [0, 1]


def test_mpirun_shows_neither(tmp_path: Path) -> None:
    result = examine(tmp_path, ranks=2, start_with="mpi", **SECRETS)
    assert result.of("environment") == result.of("rendezvous") == []


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


def test_files_that_killed_processes_left_are_named_with_their_removal(tmp_path: Path) -> None:
    if reason := lacking("unshare"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
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
