"""A run in which no step ends is ended, the rank that the others wait for is named, and stacks are saved."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_volo.data.demo.demo_set import make_demo_set
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


_RANK = """
import sys, time
from pathlib import Path
from horovod_volo.cluster.watchdog import Watchdog
rank, folder, elastic = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "elastic"
watchdog = Watchdog(8.0, elastic=elastic)
watchdog.watch_steps(rank, ["one", "two"], folder)
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
    for late, hanging in (said[:2], said[2:]):
        assert late.count("no step has ended") == 1
        assert "rank 1 on two computes or reads data, after step 3; 1 of 2 ranks wait for others" in late
        assert "gives no report" not in late
        assert not hanging
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL, 0, -signal.SIGKILL]


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
