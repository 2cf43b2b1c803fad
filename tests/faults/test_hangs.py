"""A run in which no step ends is ended, the rank that others wait for is named, and stacks are saved."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.launching import wait_until
from tests.runs import FAILED, start

LIMIT = 10  # seconds; the first step on a busy machine takes several
_WATCHED = """
import os, sys, time
from pathlib import Path
from horovod_volo.cluster.watchdog import Watchdog
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
watchdog = Watchdog(float(sys.argv[3]), ranks_change=False)
heartbeat = watchdog.heartbeat
watchdog.watch_ranks(rank, ["one", "two"], folder)
print(watchdog._process.pid, flush=True)
"""


def watched(folder: Path, *works: str, limit: int = 3) -> list[tuple[subprocess.Popen[str], int]]:
    """Start a process for each rank, which runs a program; return it with the number of its watchdog."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _WATCHED + work, str(rank), str(folder), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, work in enumerate(works)
    ]
    return [(rank, int(rank.stdout.readline())) for rank in started if rank.stdout is not None]


@pytest.mark.parametrize(
    ("fault", "start_with", "limit", "doing", "stack"),
    [
        ("1:3:SIGSTOP", "gloo", LIMIT, "is stopped by a signal, after step 3", "is stopped by a signal"),
        ("1:3:lock", "mpi", LIMIT, "computes or reads data, after step 3", "_lock_interpreter"),
        ("1:0:import", "gloo", 6, "computes or reads data, while importing plugins", "injected.py"),
        # A FIFO is opened for reading, as a file of a server that does not answer.
        pytest.param(
            *("0:0:unlisted", "gloo", 6, "computes or reads data, while listing the data", ""),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_rank_that_hangs_is_named(images, tmp_path, monkeypatch, fault, start_with, limit, doing, stack):
    monkeypatch.chdir(tmp_path)  # the FIFO is made there
    flags = ("--checkpoint-every", "2", "--hang-timeout", str(limit))
    settings = {"fault": fault, "start_with": start_with, "status": FAILED}
    shown = start(images, tmp_path, *flags, **settings, seconds=60)
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    (message,) = (line for line in shown.splitlines() if f"no step has ended for {limit} s" in line)
    assert f"ended: rank {fault[0]} on {host} {doing}; 1 of 2 ranks wait for others" in message
    if stack:
        (folder,) = (tmp_path / "run" / "hang").iterdir()
        assert stack in (folder / "rank_1.txt").read_text()
    if ":3:" in fault:
        assert "_wait_for" in (folder / "rank_0.txt").read_text()
        assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def test_a_folder_that_does_not_answer_does_not_keep_a_rank(tmp_path):
    (tmp_path / "silent").mkdir()
    for number in (1, 2, 3):
        os.mkfifo(tmp_path / "silent" / f".rank_0.hangs.{number}")  # the watchdog waits for a reader
    ((rank, _),) = watched(tmp_path / "silent", "heartbeat.begin('listing the data'); time.sleep(60)")
    said = rank.communicate(timeout=60)[1]
    assert rank.returncode == -signal.SIGKILL
    assert re.fullmatch(r".*hangs while listing the data, and \S+/silent does not answer\..*\n", said)


def test_signals_to_all_processes_of_a_job_leave_the_watchdog(tmp_path):
    ((rank, watchdog),) = watched(tmp_path, "time.sleep(60)")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        os.kill(watchdog, number)
    said = rank.communicate(timeout=30)[1]
    assert rank.returncode == -signal.SIGKILL
    assert "error: no step has ended for 3 s" in said
    (other, watchdog) = watched(tmp_path, "time.sleep(60)")[0]
    other.kill()
    other.communicate()
    command = Path(f"/proc/{watchdog}/cmdline")
    wait_until(lambda: not (command.exists() and command.read_bytes()), 5, "the watchdog's end")


def test_a_watchdog_that_has_ended_does_not_end_the_run(tmp_path):
    work = "watchdog._process.wait(); watchdog.watch_ranks(rank, ['one'], folder); watchdog.close()"
    ((rank, watchdog),) = watched(tmp_path, work)
    os.kill(watchdog, signal.SIGKILL)
    said = rank.communicate(timeout=30)[1]
    assert rank.returncode == 0, said
    assert said == "warning: the watchdog of rank 0 has ended: nobody notices if this rank hangs\n"


def test_a_job_that_was_suspended_is_not_taken_for_hung(tmp_path):
    """As by `scontrol suspend`; hosts wake at slightly different times."""
    work = "heartbeat.waits(rank == 1); [time.sleep(0.01) for part in range(600)]"
    ranks = watched(tmp_path, work, work, limit=7)
    time.sleep(0.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank, watchdog in ranks:
            os.kill(watchdog, number)
            os.kill(rank.pid, number)
            time.sleep(1.0)
        time.sleep(6.0 if number == signal.SIGSTOP else 0.0)
    assert [(rank.communicate(timeout=30)[1], rank.returncode) for rank, _ in ranks] == [("", 0), ("", 0)]


def test_a_slow_rank_is_named_within_two_log_points(demo_images, tmp_path):
    flags = ("--epochs", "2", "--log-every", "2", "--workers", "1")
    # Five steps an epoch, so that little is read ahead.
    start(demo_images(40, 20), tmp_path, *flags, fault="1:0:slow")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    named = [number for number, line in enumerate(lines) if "the other ranks wait for rank 1 on" in line]
    assert named, lines
    assert len([line for line in lines[: named[0]] if line.startswith("step ")]) == 2
    milliseconds = int(lines[named[0]].split("of its time, ")[1].split()[0])
    assert 40 < milliseconds < 250  # 4 images, 50 ms each, partly read ahead
