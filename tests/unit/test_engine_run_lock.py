"""The lock of a run folder is refused while its owner lives, and taken over when it does not."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_run

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.elastic.ledger import Ledger
from horovod_volo.engine import loop, run_lock
from horovod_volo.engine.callbacks import Callbacks
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.engine.run_lock import RunLock

HOLD = """
import sys
from pathlib import Path
from horovod_volo.core.errors import UserError
from horovod_volo.engine.run_lock import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
except UserError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
    lock.close()
"""


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock in another process, if that can take it."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def change(folder: Path, **changes: Any) -> None:
    owner = json.loads((folder / "lock.json").read_text())
    (folder / "lock.json").write_text(json.dumps(owner | changes))


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert answer(first) == "taken"
        with pytest.raises(UserError, match=rf"is in use by process {first.pid} on .* give this run another"):
            RunLock(tmp_path)
        first.communicate("")
    assert not list(tmp_path.iterdir())
    with closing(RunLock(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_a_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert answer(first) == "taken"
        change(tmp_path, started="1")
        RunLock(tmp_path).close()


def test_a_damaged_lock_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("{")
    with closing(RunLock(tmp_path)):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"]


@pytest.mark.parametrize(
    "other", [{"boot": "another"}, {"processes": "pid:[1]"}], ids=["host of the same name", "container"]
)
def test_a_lock_of_another_host_is_taken_over_if_it_no_longer_changes(tmp_path, monkeypatch, capsys, other):
    monkeypatch.setattr(run_lock, "_STALE_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "_REFRESH_SECONDS", 0.1)
    lost = RunLock(tmp_path)
    change(tmp_path, **other)
    with pytest.raises(UserError, match="is in use by process"):  # its owner rewrites it
        RunLock(tmp_path)
    assert "waiting to see whether process" in capsys.readouterr().err
    lost._closed.set()  # as if its host had failed
    lost._thread.join()
    change(tmp_path, **other)
    with closing(RunLock(tmp_path)) as taken:
        taken.check()
        with pytest.raises(UserError, match=r"was taken over by process .* Nothing more is written here"):
            lost.check()
        lost.close()
        taken.check()
        assert (tmp_path / "lock.json").exists()
    assert not list(tmp_path.iterdir())


def test_a_rank_without_which_its_job_has_gone_on_takes_no_lock(tmp_path):
    """It was stopped for so long, and has not noticed yet."""
    with closing(RunLock(tmp_path, "job")) as lock:
        with pytest.raises(UserError, match="is in use by process"):
            RunLock(tmp_path, "job", lambda: False)
        lock.check()
        with closing(RunLock(tmp_path, "job")):
            pass
    with pytest.raises(UserError, match="is that of other ranks"):
        RunLock(tmp_path, "job", lambda: False)
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_taken_and_released_is_lost(tmp_path):
    """The process was stopped for so long that another one has trained here, and ended."""
    with closing(RunLock(tmp_path)) as lost:
        (tmp_path / "lock.json").unlink()
        with pytest.raises(UserError, match=r"was taken over by a process that has ended"):
            lost.check()


def test_a_link_that_is_made_but_reported_as_failed_is_a_lock(tmp_path, monkeypatch):
    """As over NFS: the answer of the server was lost, and the client asked again."""
    link = os.link

    def made_and_failed(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", made_and_failed)
    with closing(RunLock(tmp_path)) as lock:
        lock.check()
    assert not list(tmp_path.iterdir())


def test_a_refresh_does_not_overwrite_a_lock_that_was_taken_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_REFRESH_SECONDS", 0.1)
    path, dumps, taken = tmp_path / "lock.json", json.dumps, threading.Event()

    def take_and_dump(owner: dict[str, Any]) -> str:
        if threading.current_thread().name == "run lock":
            path.unlink()
            path.write_text(dumps(owner | {"id": "another"}))
            taken.set()
        return dumps(owner)

    lost = RunLock(tmp_path)
    monkeypatch.setattr(json, "dumps", take_and_dump)
    assert taken.wait(5)
    lost.close()
    assert json.loads(path.read_text())["id"] == "another"


def test_a_run_that_has_lost_its_lock_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = setup(small_run(tmp_path), World.single(), StopRequest())
    ledger = Ledger()
    context.callbacks = Callbacks([ledger], context.stop)
    context.callbacks.started(context)
    ledger.note(1, (0, 0))
    change(context.folder, id="another")
    files = {path: path.read_bytes() for path in context.folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"was taken over by process .* Nothing more is written here"):
        loop.fit(context)
    with pytest.raises(ZeroDivisionError), closing(context):  # the error of the run is not replaced
        raise ZeroDivisionError
    assert not context.lock._thread.is_alive()
    assert {path: path.read_bytes() for path in context.folder.rglob("*") if path.is_file()} == files


def test_one_of_many_processes_takes_the_lock_of_a_killed_one_at_once(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert answer(first) == "taken"
        first.kill()
        first.wait()
    with ExitStack() as processes:
        opened = [processes.enter_context(holding(tmp_path)) for _ in range(6)]
        assert sorted(map(answer, opened)) == ["refused"] * 5 + ["taken"]
    began = time.monotonic()
    RunLock(tmp_path).close()  # they were killed, too
    assert time.monotonic() - began < 1
