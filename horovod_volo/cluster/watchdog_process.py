"""The heartbeat of a rank, and the program that watches it: python watchdog_process.py '{"rank": 0, ...}'.

The program is a process of its own. Neither Python's lock nor a collective that never ends keeps it from
reading the heartbeat, which is memory that both share. It is started by its path and imports the standard
library alone, so that it takes milliseconds and a few MB.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

DUMP = signal.SIGUSR2  # makes the rank write its stacks
_POLL_SECONDS, _STOPPED_SECONDS = 1.0, 5.0
_GLOO_TIMEOUT_SECONDS = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 30))
_REPORT_SECONDS = 5.0  # after the last report, until all ranks have read it
_MISSING_SECONDS = 15.0  # after the last report, for ranks whose heartbeat or disk is slower
_MESSAGE_SECONDS, _DUMP_SECONDS = 3.0, 2.0
_WAITS, _WORKS, _STOPPED = "waits for other ranks", "computes or reads data", "is stopped by a signal"
_STATES = {"T": _STOPPED, "t": _STOPPED, "D": "waits for a disk or a file server"}

_FORMAT = struct.Struct("dqd?")


class Progress(NamedTuple):
    """What a rank has last noted."""

    beat: float = 0.0  # time.monotonic() at the end of the last step or evaluation batch
    step: int = 0
    limit: float = 0.0  # seconds without a beat after which the rank hangs; 0: not watched
    waits: bool = False  # whether it waits for other ranks in a collective


class Heartbeat:
    """The progress of a rank, which notes it, and whose watchdog reads it."""

    def __init__(self, descriptor: int = -1) -> None:
        """Share the memory behind a file descriptor; without one, nobody watches."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        self._progress = Progress()

    def beat(self, step: int) -> None:
        """Note that a step, or a batch of the evaluation after it, has ended."""
        self._write(beat=time.monotonic(), step=step)

    def watch(self, limit: float) -> None:
        """Let the rank count as hanging after `limit` seconds without a beat; 0: never."""
        self._write(beat=time.monotonic(), limit=limit)

    def waits(self, waits: bool) -> None:
        """Note whether this rank waits for others in a collective."""
        self._write(waits=waits)

    def read(self) -> Progress:
        """Return what was noted last."""
        return Progress(*_FORMAT.unpack_from(self._memory))

    def _write(self, **changes: Any) -> None:
        self._progress = self._progress._replace(**changes)
        _FORMAT.pack_into(self._memory, 0, *self._progress)


class Watch:
    """Watches one rank."""

    def __init__(self, *, rank: int, host: str, pid: int, stacks: int, elastic: bool) -> None:
        self._rank, self._pid, self._stacks, self._elastic = rank, pid, stacks, elastic
        self._own_name = f"rank {rank} on {host}"
        self._hosts: list[str] = []  # of all ranks, once they are connected
        self._folder = Path()
        self._reported = 0.0  # when the report of this rank was written
        self._count, self._changed = 0, 0.0  # reports of all ranks, and when this last changed
        self._stopped, self._said = 0.0, False  # seconds for which the rank is stopped

    def begin(self, *, rank: int, hosts: list[str], folder: str) -> None:
        """Watch the steps of these ranks from now on."""
        self._rank, self._hosts, self._folder = rank, hosts, Path(folder)
        self._own_name, self._reported = self._name(rank), 0.0

    def check(self, progress: Progress) -> bool:
        """Report a rank that hangs; kill it and return True when the others have reported."""
        if self._is_stopped_for_good():
            return self._kill()
        now, since = time.monotonic(), time.monotonic() - progress.beat
        if not progress.limit or since < progress.limit:
            if self._reported:  # it goes on
                self._file("json").unlink(missing_ok=True)
                self._reported = 0.0
            return False
        if not self._hosts:
            doing = self._state() or "does not connect, or waits for one that does not"
            self._say(f"error: {self._own_name} {doing}, for {progress.limit:g} s (--hang-timeout).")
            return self._kill()
        if not self._reported:
            self._reported = now
            self._report(progress)
        reports = self._reports()
        if len(reports) != self._count:
            self._count, self._changed = len(reports), now
        # The same for all ranks, so that none is killed before the message is out.
        quiet = now - max(self._reported, self._changed)
        culprits = [rank for rank, report in reports.items() if report["state"] != _WAITS]
        # Ranks that have not reported may be at work, on a batch of the evaluation that takes them longer.
        is_complete = len(reports) == len(self._hosts) or since > 2 * progress.limit
        enough = _MISSING_SECONDS if culprits else math.inf
        if quiet < (_REPORT_SECONDS if is_complete else enough):
            return False
        if self._rank == min(reports, default=self._rank):
            self._say(self._message(progress.limit, reports))
        time.sleep(_MESSAGE_SECONDS)
        if self._elastic and culprits and self._rank not in culprits:
            self._reported = math.inf  # it goes on without them, and has nothing more to report
            return False
        return self._kill()

    def _kill(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return True

    def _is_stopped_for_good(self) -> bool:
        """Say that the rank is stopped by a signal; return True if an elastic job has given it up."""
        self._stopped = self._stopped + _POLL_SECONDS if self._state() == _STOPPED else 0.0
        if self._elastic and self._stopped >= _GLOO_TIMEOUT_SECONDS:
            self._say(
                f"{self._own_name} was stopped by a signal for {self._stopped:g} s. The others go on without "
                "it, and it is ended."
            )
            return True
        if self._stopped >= _STOPPED_SECONDS and not self._said:
            self._said = True
            remedy = f"`kill -CONT {self._pid}` lets it go on"
            self._say(f"{self._own_name} is stopped by a signal, and other ranks wait for it: {remedy}.")
        return False

    def _report(self, progress: Progress) -> None:
        """Write where this rank is, and the stacks of its threads."""
        state = self._state() or (_WAITS if progress.waits else _WORKS)
        stacks = state.encode() if state == _STOPPED else self._dump()
        partial = self._folder / f".{self._file('json').name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file("txt").write_bytes(stacks)
            partial.write_text(json.dumps({"rank": self._rank, "step": progress.step, "state": state}))
            partial.replace(self._file("json"))
        except OSError as error:
            self._say(f"{self._own_name} {state}. Its stacks cannot be saved: {error.strerror}.")

    def _message(self, limit: float, reports: dict[int, dict[str, Any]]) -> str:
        """Name the ranks that the others wait for."""
        missing = [rank for rank in range(len(self._hosts)) if rank not in reports]
        names = [f"{self._name(rank)} gives no report: has its host failed?" for rank in missing]
        waiting = 0
        for rank, report in reports.items():
            if report["state"] == _WAITS:
                waiting += 1
            else:
                names.append(f"{self._name(rank)} {report['state']}, after step {report['step']}")
        ended = "the run goes on without these ranks" if self._elastic and names else "this run is ended"
        resume = "" if self._elastic and names else " Resume with --resume auto."
        return (
            f"error: no step has ended for {limit:g} s (--hang-timeout), so {ended}: "
            f"{'; '.join(names) or 'all ranks wait'}; {waiting} of {len(self._hosts)} ranks wait for others. "
            f"Their stacks are in {self._folder}.{resume}"
        )

    def _state(self) -> str:
        """Return why the rank does not run, if the kernel says so."""
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return _STATES.get(stat.rpartition(") ")[2][:1], "")

    def _dump(self) -> bytes:
        """Return the stacks of the rank's threads, which it writes itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, DUMP)
        limit = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < limit and not os.fstat(self._stacks).st_size:
            time.sleep(0.05)
        time.sleep(0.1)  # until they are complete
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)

    def _reports(self) -> dict[int, dict[str, Any]]:
        try:
            found = [json.loads(path.read_text()) for path in sorted(self._folder.glob("rank_*.json"))]
        except (OSError, ValueError):
            return {}
        return {report["rank"]: report for report in found}

    def _file(self, kind: str) -> Path:
        return self._folder / f"rank_{self._rank}.{kind}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main(pid: int, told: int, heartbeat: int, **watched: Any) -> None:
    """Watch the rank until it ends: then nobody holds the other end of the pipe `told`."""
    memory, watch = Heartbeat(heartbeat), Watch(pid=pid, **watched)
    with os.fdopen(told) as lines:
        while os.getppid() == pid:
            if select.select([lines], [], [], _POLL_SECONDS)[0]:
                line = lines.readline()
                if not line:
                    return
                watch.begin(**json.loads(line))
            elif watch.check(memory.read()):
                return


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
