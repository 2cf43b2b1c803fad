"""The watchdogs of a job go on when their folder fails, name the rank that hangs, and end no healthy run."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.cluster import watchdog_process
from horovod_volo.cluster.heartbeat import Heartbeat
from horovod_volo.cluster.watchdog_process import Watch

LIMIT = 20


class HandSetClock:
    """A clock that the test sets; to sleep sets it too."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class WatchedJob:
    """Ranks that do nothing, in processes of their own, and their watchdogs."""

    def __init__(self, folder: Path, clock: HandSetClock, ranks: int, hosts: int, ranks_change: bool) -> None:
        self.clock, self.beats = clock, [Heartbeat() for _ in range(ranks)]
        command = ["sh", "-c", "trap '' USR2; echo; exec sleep 60"]
        self.processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(ranks)]
        self.watches = []
        for rank, process in enumerate(self.processes):
            process.stdout.readline()
            stacks = os.memfd_create("stacks")
            watch = Watch(rank=rank, host="one", pid=process.pid, stacks=stacks, ranks_change=ranks_change)
            watch.begin(rank=rank, hosts=["one"] * hosts, folder=str(folder))
            self.watches.append(watch)
            self.beats[rank].watch(LIMIT)
        self.killed: list[int] = []

    def go_on(self, seconds: int, *at_work: int) -> list[int]:
        """Let seconds pass, in which some ranks are at work; return the ranks that have been killed."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 1.0
            for rank, watch in enumerate(self.watches):
                if rank in at_work:
                    self.beats[rank].beat(1)
                if rank not in self.killed and watch.check(self.beats[rank].read()):
                    self.killed.append(rank)
        return self.killed

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that starts a job; its watchdogs meet in `tmp_path / "hang"`."""
    clock, jobs = HandSetClock(), []
    monkeypatch.setattr(watchdog_process, "time", clock)

    def started(ranks: int = 2, *, hosts: int = 0, ranks_change: bool = False) -> WatchedJob:
        jobs.append(WatchedJob(tmp_path / "hang", clock, ranks, hosts or ranks, ranks_change))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


def failing(number: int) -> Any:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EACCES])
def test_a_folder_that_fails_for_a_while_ends_neither_watchdog_nor_run(start, monkeypatch, capfd, number):
    """Rank 0 waits for longer than two limits for rank 1, whose batch takes long."""
    job = start()
    job.beats[0].waits(True)
    assert job.go_on(3 * LIMIT, 1) == []
    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir", "stat"):
            patch.setattr(os, name, failing(number))
        assert job.go_on(LIMIT // 2, 1) == []
    assert job.go_on(LIMIT, 1) == []
    assert job.go_on(3 * LIMIT) == [0, 1]  # rank 1 hangs: the next looks work
    assert capfd.readouterr().err.count("error: no step has ended") == 1


@pytest.mark.parametrize(("call", "seconds"), [("replace", 5), ("unlink", LIMIT)])
def test_the_report_of_a_rank_that_goes_on_does_not_stay(start, monkeypatch, tmp_path, call, seconds):
    job = start(3)
    job.beats[0].waits(True)
    assert job.go_on(LIMIT + 5, 2) == []
    assert len(list((tmp_path / "hang").glob("rank_1.hangs.*"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        assert job.go_on(seconds, 1, 2) == []
    assert job.go_on(LIMIT, 1, 2) == []
    assert job.go_on(LIMIT, 1, 2) == []
    assert list((tmp_path / "hang").glob("rank_1.hangs.*")) == []


def test_a_full_disk_keeps_no_rank_from_answering(start, monkeypatch, capfd):
    """An empty file needs no block of the disk."""
    write_text = Path.write_text
    fails = failing(errno.ENOSPC)
    monkeypatch.setattr(Path, "write_text", lambda path, text: fails() if text else write_text(path, text))
    job = start()
    job.beats[0].waits(True)
    assert job.go_on(4 * LIMIT, 1) == []
    assert capfd.readouterr().err == ""


def test_a_rank_that_waited_and_then_hangs_in_the_same_stage_is_named(start, capfd):
    job = start(3, ranks_change=True)
    for beats in job.beats:
        beats.begin("importing plugins")
    for rank in (0, 1):
        job.beats[rank].waits(True)
    assert job.go_on(LIMIT + 5, 2) == []
    job.beats[1].waits(False)  # the collective has ended, and rank 1 hangs before the next one
    job.beats[2].waits(True)
    assert job.go_on(3 * LIMIT) == [1]
    (message,) = (line for line in capfd.readouterr().err.splitlines() if "no step has ended" in line)
    assert "rank 1 on one computes or reads data, while importing plugins; " in message
    assert "rank 0 on" not in message


@pytest.mark.parametrize(("hosts", "seconds"), [(3, 2 * LIMIT), (1000, 10)])
def test_ranks_whose_collective_has_failed_are_not_taken_for_hung(start, hosts, seconds):
    """They keep their state before they go on. With 1,000 hosts, they have not looked by then."""
    job = start(3, hosts=hosts, ranks_change=True)
    for rank in (0, 1):
        job.beats[rank].waits(True)
    job.go_on(3, 2)
    while 2 not in job.go_on(1):
        assert job.clock.now < 4 * LIMIT
    for rank in (0, 1):
        job.beats[rank].waits(False)
    assert job.go_on(seconds) == [2]
    assert job.go_on(LIMIT, 0, 1) == [2]


def test_a_hang_that_has_ended_does_not_decide_on_a_later_one(start, capfd):
    job = start(2, ranks_change=True)
    job.beats[0].waits(True)
    said = ""
    while "rank 1 on one computes" not in said:
        assert job.clock.now < 4 * LIMIT
        job.clock.now += 1.0
        job.beats[1].waits(False)
        for rank in (1, 0):
            assert not job.watches[rank].check(job.beats[rank].read())
        said += capfd.readouterr().err
    job.beats[1].beat(1)  # before its watchdog looks
    job.beats[0].waits(False)
    assert job.go_on(5, 0, 1) == []
    job.beats[0].waits(True)
    assert job.go_on(3 * LIMIT, 1) == []  # a long batch of rank 1
    assert capfd.readouterr().err == ""
    assert job.go_on(4 * LIMIT) == [1]
    assert "rank 1 on one computes" in capfd.readouterr().err
