"""A run in which no step ends is ended, the rank that the others wait for is named, and stacks are saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import train

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "0")
LIMIT = 10  # seconds; the first step on a busy machine takes several


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)
    return folder


@pytest.mark.parametrize(
    ("fault", "start_with", "state", "stack"),
    [
        ("SIGSTOP", "mpi", "is stopped by a signal", "is stopped by a signal"),
        ("SIGSTOP", "gloo", "is stopped by a signal", "is stopped by a signal"),
        ("lock", "mpi", "computes or reads data", "_lock_interpreter"),
    ],
)
def test_the_rank_that_hangs_is_named(
    images: Path, tmp_path: Path, fault: str, start_with: str, state: str, stack: str
) -> None:
    began = time.monotonic()
    done = train(
        *(str(images), *SMALL, "--output", str(tmp_path), "--name", "run"),
        *("--checkpoint-every", "2", "--hang-timeout", str(LIMIT), "--plugin", "tests.faults.injected"),
        ranks=2,
        start_with=start_with,
        seconds=100,
        INJECTED_FAULT=f"1:3:{fault}",
    )
    assert time.monotonic() - began < 60
    assert done.returncode not in (0, 75), done.stdout
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    messages = [line for line in done.stdout.splitlines() if f"no step has ended for {LIMIT} s" in line]
    assert len(messages) == 1, done.stdout
    assert f"ended: rank 1 on {host} {state}, after step 3; 1 of 2 ranks wait for others" in messages[0]
    (folder,) = (tmp_path / "run" / "hang").iterdir()
    assert stack in (folder / "rank_1.txt").read_text()
    assert "_wait_for" in (folder / "rank_0.txt").read_text()
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def hung(done: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a run that was ended because it hangs."""
    assert done.returncode not in (0, 75), done.stdout
    messages = [line for line in done.stdout.splitlines() if "no step has ended for 6 s" in line]
    assert len(messages) == 1, done.stdout
    return messages[0]


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_a_rank_that_hangs_while_it_imports_a_plugin_is_named(
    images: Path, tmp_path: Path, start_with: str
) -> None:
    done = train(
        *(str(images), *SMALL, "--output", str(tmp_path), "--name", "run", "--hang-timeout", "6"),
        *("--plugin", "tests.faults.injected"),
        ranks=2,
        start_with=start_with,
        seconds=40,
        INJECTED_FAULT="1:0:import",
    )
    message = hung(done)
    assert "ended: rank 1 on " in message
    assert "computes or reads data, while importing plugins; 1 of 2 ranks wait for others" in message
    (folder,) = (tmp_path / "run" / "hang").iterdir()
    assert "injected.py" in (folder / "rank_1.txt").read_text()


def test_a_rank_that_waits_for_a_file_while_it_lists_the_data_is_named(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO is opened for reading, as a file of a server that does not answer."""
    monkeypatch.chdir(tmp_path)
    done = train(
        *(str(images), *SMALL, "--output", str(tmp_path), "--name", "run"),
        *("--hang-timeout", "6", "--plugin", "tests.faults.injected"),
        INJECTED_FAULT="0:0:unlisted",
        ranks=2,
        start_with="gloo",
        seconds=40,
    )
    message = hung(done)
    assert "ended: rank 0 on " in message
    assert "computes or reads data, while listing the data; 1 of 2 ranks wait for others" in message


_RANK = """
import sys, time
from pathlib import Path
from horovod_volo.cluster.watchdog import Watchdog
rank, folder, elastic = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "elastic"
watchdog = Watchdog(8.0, ranks_change=elastic)
watchdog.watch_ranks(rank, ["one", "two"], folder)
watchdog.heartbeat.beat(3)
if rank == 0:
    time.sleep(6)  # a long batch of the evaluation
    watchdog.heartbeat.beat(3)
    watchdog.heartbeat.waits(True)
time.sleep(24)
"""


def test_a_rank_whose_last_beat_is_later_is_not_taken_for_lost(tmp_path: Path) -> None:
    commands = [
        [sys.executable, "-c", _RANK, str(rank), str(tmp_path / job), job]
        for job in ("fixed", "elastic")
        for rank in range(2)
    ]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    for both in ("".join(said[:2]), "".join(said[2:])):
        assert both.count("no step has ended") == 1
        assert "rank 1 on two computes or reads data, after step 3; 1 of 2 ranks wait for others" in both
        assert "gives no report" not in both
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL, 0, -signal.SIGKILL]


_WATCHED = """
import os, sys, time
from pathlib import Path
from horovod_volo.cluster.watchdog import Watchdog
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
watchdog = Watchdog(float(sys.argv[3]))
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


def test_a_folder_that_does_not_answer_does_not_keep_the_rank(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        os.mkfifo(tmp_path / f".rank_0.hangs.{number}")  # the watchdog waits for a reader
    ((rank, _),) = watched(tmp_path, "heartbeat.begin('listing the data'); time.sleep(60)")
    said = rank.communicate(timeout=30)[1]
    assert f"hangs while listing the data, and {tmp_path} does not answer." in said
    assert said.count("\n") == 1
    assert rank.returncode == -signal.SIGKILL


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


def test_ranks_wait_for_one_that_makes_progress_in_a_long_stage(tmp_path: Path) -> None:
    lists = """
heartbeat.begin("listing the data")
for _ in range(11):
    time.sleep(1)
    heartbeat.beat()
if folder.name == "hangs":
    time.sleep(60)
"""
    waits = """
heartbeat.begin("listing the data")
heartbeat.waits(True)
time.sleep(12 if folder.name == "goes_on" else 60)
"""
    goes_on, hangs = (watched(tmp_path / name, lists, waits) for name in ("goes_on", "hangs"))
    assert [(rank.communicate(timeout=30)[1], rank.returncode) for rank, _ in goes_on] == [("", 0), ("", 0)]
    said = [rank.communicate(timeout=30)[1] for rank, _ in hangs]
    assert [rank.returncode for rank, _ in hangs] == [-signal.SIGKILL] * 2
    message = "rank 0 on one computes or reads data, while listing the data; 1 of 2 ranks wait for others"
    assert "".join(said).count(message) == 1


def test_a_slow_rank_is_named_within_two_log_points(images: Path, tmp_path: Path) -> None:
    done = train(
        *(str(images), *SMALL, "--output", str(tmp_path), "--name", "run"),
        *("--log-every", "2", "--plugin", "tests.faults.injected", "--workers", "1"),
        ranks=2,
        start_with="gloo",
        INJECTED_FAULT="1:0:slow",
    )
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    named = [number for number, line in enumerate(lines) if "the other ranks wait for rank 1 on" in line]
    assert named, lines
    assert len([line for line in lines[: named[0]] if line.startswith("step ")]) == 2
    milliseconds = int(lines[named[0]].split("of its time, ")[1].split()[0])
    assert 40 < milliseconds < 250  # 4 images, 50 ms each, partly read ahead
