"""A run in which no step ends is ended, the rank that the others wait for is named, and stacks are saved."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from tests.faults.runs import start

LIMIT = 10  # seconds; the first step on a busy machine takes several
_WATCHED = """
import os, sys, time
from pathlib import Path
from horovod_volo.cluster.watchdog import Watchdog
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
watchdog = Watchdog(float(sys.argv[3]), ranks_change=folder.name == "elastic")
heartbeat = watchdog.heartbeat
watchdog.watch_ranks(rank, ["one", "two"], folder)
print(watchdog._process.pid, flush=True)
"""
Ranks = list[tuple[subprocess.Popen[str], int]]  # with the number of their watchdog


def watched(folder: Path, *works: str, limit: int = 3) -> Ranks:
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


BEATS = "heartbeat.beat(3); "
# Rank 0 beats again after 6 s, as in a long batch of an evaluation, and then waits.
BEATS_LATER = f"{BEATS}time.sleep(6); heartbeat.beat(3); heartbeat.waits(True); time.sleep(24)"
LISTS = """
heartbeat.begin("listing the data")
for _ in range(11):
    time.sleep(1)
    heartbeat.beat()
if folder.name == "hangs":
    time.sleep(60)
"""
WAITS = """
heartbeat.begin("listing the data")
heartbeat.waits(True)
time.sleep(12 if folder.name == "goes_on" else 60)
"""


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """Start ranks that take up to half a minute, mostly asleep, while the first tests of this file run."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "silent").mkdir()
    for number in (1, 2, 3):
        os.mkfifo(folder / "silent" / f".rank_0.hangs.{number}")  # the watchdog waits for a reader
    works = (BEATS_LATER, f"{BEATS}time.sleep(30)")
    found = {name: watched(folder / name, *works, limit=8) for name in ("fixed", "elastic")}
    found |= {name: watched(folder / name, LISTS, WAITS) for name in ("goes_on", "hangs")}
    found["silent"] = watched(folder / "silent", "heartbeat.begin('listing the data'); time.sleep(60)")
    yield found
    for rank, _ in itertools.chain(*found.values()):
        rank.kill()


@pytest.mark.parametrize(
    ("fault", "start_with", "limit", "named", "doing", "stack"),
    [
        ("1:3:SIGSTOP", "gloo", LIMIT, 1, "is stopped by a signal, after step 3", "is stopped by a signal"),
        ("1:3:lock", "mpi", LIMIT, 1, "computes or reads data, after step 3", "_lock_interpreter"),
        ("1:0:import", "gloo", 6, 1, "computes or reads data, while importing plugins", "injected.py"),
        # A FIFO is opened for reading, as a file of a server that does not answer.
        ("0:0:unlisted", "gloo", 6, 0, "computes or reads data, while listing the data", ""),
    ],
)
def test_the_rank_that_hangs_is_named(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    start_with: str,
    limit: int,
    named: int,
    doing: str,
    stack: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # the FIFO is made there
    began = time.monotonic()
    flags = ("--checkpoint-every", "2", "--hang-timeout", str(limit))
    status, shown = start(images, tmp_path, *flags, fault=fault, start_with=start_with, seconds=100)
    assert time.monotonic() - began < 60
    assert status not in (0, 75), shown
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    (message,) = (line for line in shown.splitlines() if f"no step has ended for {limit} s" in line)
    assert f"ended: rank {named} on {host} {doing}; 1 of 2 ranks wait for others" in message
    if stack:
        (folder,) = (tmp_path / "run" / "hang").iterdir()
        assert stack in (folder / "rank_1.txt").read_text()
    if ":3:" in fault:
        assert "_wait_for" in (folder / "rank_0.txt").read_text()
        assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def test_signals_to_all_processes_of_a_job_leave_the_watchdog(tmp_path: Path) -> None:
    ((rank, watchdog),) = watched(tmp_path, "time.sleep(60)")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        os.kill(watchdog, number)
    said = rank.communicate(timeout=30)[1]
    assert rank.returncode == -signal.SIGKILL
    assert "error: no step has ended for 3 s" in said
    (other, watchdog) = watched(tmp_path, "time.sleep(60)")[0]
    other.kill()
    other.communicate()
    limit = time.monotonic() + 5
    while Path(f"/proc/{watchdog}/cmdline").exists() and Path(f"/proc/{watchdog}/cmdline").read_bytes():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_watchdog_that_has_ended_does_not_end_the_run(tmp_path: Path) -> None:
    work = "watchdog._process.wait(); watchdog.watch_ranks(rank, ['one'], folder); watchdog.close()"
    ((rank, watchdog),) = watched(tmp_path, work)
    os.kill(watchdog, signal.SIGKILL)
    said = rank.communicate(timeout=30)[1]
    assert rank.returncode == 0, said
    assert said == "warning: the watchdog of rank 0 has ended: nobody notices if this rank hangs\n"


def test_a_job_that_was_suspended_is_not_taken_for_hung(tmp_path: Path) -> None:
    """As by `scontrol suspend`; hosts wake at slightly different times."""
    work = "heartbeat.waits(rank == 1); [time.sleep(0.01) for part in range(1000)]"
    ranks = watched(tmp_path, work, work, limit=11)
    time.sleep(0.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank, watchdog in ranks:
            os.kill(watchdog, number)
            os.kill(rank.pid, number)
            time.sleep(1.0)
        time.sleep(9.0 if number == signal.SIGSTOP else 0.0)
    assert [(rank.communicate(timeout=30)[1], rank.returncode) for rank, _ in ranks] == [("", 0), ("", 0)]


def test_a_slow_rank_is_named_within_two_log_points(tmp_path: Path) -> None:
    make_demo_set(tmp_path / "set", train=40, val=20)  # five steps an epoch, so that little is read ahead
    flags = ("--epochs", "2", "--log-every", "2", "--workers", "1")
    status, shown = start(tmp_path / "set", tmp_path, *flags, fault="1:0:slow")
    assert status == 0, shown
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    named = [number for number, line in enumerate(lines) if "the other ranks wait for rank 1 on" in line]
    assert named, lines
    assert len([line for line in lines[: named[0]] if line.startswith("step ")]) == 2
    milliseconds = int(lines[named[0]].split("of its time, ")[1].split()[0])
    assert 40 < milliseconds < 250  # 4 images, 50 ms each, partly read ahead


def test_only_the_rank_that_makes_no_progress_is_taken_for_hung(started: dict[str, Ranks]) -> None:
    """Not one whose last beat is later, nor one that makes progress in a long stage."""
    said = {
        name: "".join(rank.communicate(timeout=60)[1] for rank, _ in ranks) for name, ranks in started.items()
    }
    for name in ("fixed", "elastic"):
        assert said[name].count("no step has ended") == 1
        assert "rank 1 on two computes or reads data, after step 3; 1 of 2 ranks wait" in said[name]
        assert "gives no report" not in said[name]
    assert said["goes_on"] == ""
    message = "rank 0 on one computes or reads data, while listing the data; 1 of 2 ranks wait for others"
    assert said["hangs"].count(message) == 1
    # A folder that does not answer does not keep the rank.
    assert re.fullmatch(
        r".*hangs while listing the data, and \S+/silent does not answer\..*\n", said["silent"]
    )
    killed = -signal.SIGKILL
    statuses = {name: [rank.returncode for rank, _ in ranks] for name, ranks in started.items()}
    both = [killed, killed]
    expected = {"fixed": both, "elastic": [0, killed], "goes_on": [0, 0], "hangs": both, "silent": [killed]}
    assert statuses == expected
