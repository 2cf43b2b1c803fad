"""The program that watches a rank: `main(**{"rank": 0, ...})` in a process of its own.

Neither Python's lock nor a collective that never ends keeps it from reading the heartbeat, which is memory
that both share. It imports the standard library alone, so that it takes milliseconds and a few MB.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from horovod_volo.cluster.heartbeat import DUMP, Heartbeat, Progress

_POLL_SECONDS, _STOPPED_SECONDS = 1.0, 5.0
_GLOO_TIMEOUT_SECONDS = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 30))
_MISSING_SECONDS = 15.0  # after the last report, for ranks whose heartbeat or disk is slower
_MESSAGE_SECONDS, _DUMP_SECONDS, _FOLDER_SECONDS = 3.0, 2.0, 10.0
_LOOKS_PER_LIMIT = 4  # of a rank at work, for reports of others
_LOOKS_PER_SECOND = 100  # of all watchdogs together, in turn: 1,000 would read 1,000 names at the same time
_STOPPED = "is stopped by a signal"
_STATES = {"T": _STOPPED, "t": _STOPPED, "D": "waits for a disk or a file server"}
# States in the names of reports, rank_RANK.STATE.NUMBER, so that only names need to be read.
_WAITS, _HANGS, _WORKS = "waits", "hangs", "works"


class Watch:
    """Watches one rank.

    Watchdogs meet in a folder: that of a rank that hangs reports whether it waits for others, and that of a
    rank at work answers. The first to see that no rank can go on decides for all.
    """

    def __init__(self, *, rank: int, host: str, pid: int, stacks: int, ranks_change: bool) -> None:
        self._host, self._pid, self._stacks, self._go_on = host, pid, stacks, ranks_change
        # Seconds in which this process ran: when a job that was suspended wakes, they have not passed.
        self._now, self._polled = 0.0, time.monotonic()
        self._stopped, self._said = 0.0, False  # seconds for which the rank is stopped
        self._beats, self._beaten = -1, 0.0  # the last beat, and when it was seen
        self.begin(rank=rank, hosts=[], folder="")

    def begin(self, *, rank: int, hosts: list[str], folder: str) -> None:
        """Watch these ranks from now on; without hosts, the connection to them."""
        self._rank, self._hosts, self._folder = rank, hosts, Path(folder)
        self._own_name = f"rank {rank} on {self._host}"
        self._state, self._next_look = "", 0.0  # what this rank has reported since it hangs; when to look
        self._reports, self._count = list[Path](), 0  # of this rank, to be removed, and how many there were
        self._seen: dict[Path, float] = {}  # files in the folder, and when each was seen first

    def check(self, progress: Progress) -> bool:
        """Report a rank that hangs; kill it and return True when no rank can go on."""
        polled, self._polled = self._polled, time.monotonic()
        self._now += min(self._polled - polled, 2 * _POLL_SECONDS)
        if self._is_stopped_for_good():
            return self._kill()
        if progress.beats != self._beats:
            self._beats, self._beaten = progress.beats, self._now
        silent = self._now - self._beaten
        if not progress.limit or silent < progress.limit:
            self._answer(progress)
            return False
        if not self._hosts:
            doing = self._stopped_state() or f"hangs {progress.doing}, or waits for one that does"
            self._say(f"error: {self._own_name} {doing}, for {progress.limit:g} s (--hang-timeout).")
            return self._kill()
        if self._next_look < float("inf"):
            self._report_hang(progress)
        reports = self._decide(progress, silent) if self._now >= self._next_look else None
        if reports is None:
            return False
        time.sleep(_MESSAGE_SECONDS)
        if self._go_on and self._state == _WAITS and any(state == _HANGS for state, _ in reports.values()):
            self._next_look = float("inf")  # it goes on without them
            return False
        return self._kill()

    def _kill(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return True

    def _is_stopped_for_good(self) -> bool:
        """Say that the rank is stopped by a signal; return True if the others have given it up."""
        self._stopped = self._stopped + _POLL_SECONDS if self._stopped_state() == _STOPPED else 0.0
        if self._go_on and self._stopped >= _GLOO_TIMEOUT_SECONDS:
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

    def end_without_folder(self, memory: Heartbeat) -> None:
        """End a rank that hangs while `check` does too, in a folder whose file server does not answer."""
        before, polls = (0, 0.0), 0
        while polls < memory.read().limit + _FOLDER_SECONDS:
            time.sleep(_POLL_SECONDS)
            now = (memory.read().beats, self._polled)
            before, polls = now, polls + 1 if now == before and memory.read().limit else 0
        self._say(f"error: {self._own_name} hangs {memory.read().doing}, and {self._folder} does not answer.")
        self._kill()
        os._exit(1)

    def _answer(self, progress: Progress) -> None:
        """Let ranks that wait know, if there are any, that this one is at work."""
        if self._hosts and progress.limit and (self._state or self._now >= self._next_look):
            self._state, self._next_look = "", self._now + progress.limit / _LOOKS_PER_LIMIT
            others = {state for rank, (state, _) in self._look(0.0).items() if rank != self._rank}
            self._write_report(_WORKS if others else "", f"is at work, {progress.doing}")

    def _report_hang(self, progress: Progress) -> None:
        """Write where this rank is, and the stacks of its threads, unless it has reported that."""
        stopped, reported = self._stopped_state(), self._state
        self._state = _WAITS if progress.waits and not stopped else _HANGS
        if self._state == reported:
            return
        # One whose wait has ended may have lost another rank, and soon go on.
        self._next_look = self._now + (_MISSING_SECONDS if reported else self._rank / _LOOKS_PER_SECOND)
        self._write_report(self._state, f"{stopped or 'computes or reads data'}, {progress.doing}")
        stacks = stopped.encode() if stopped == _STOPPED else self._dump()
        with contextlib.suppress(OSError):
            (self._folder / f"rank_{self._rank}.txt").write_bytes(stacks)

    def _write_report(self, state: str, doing: str) -> None:
        """Replace the report of this rank; there is none without a state."""
        self._count += bool(state)
        report = self._folder / f"rank_{self._rank}.{state}.{self._count}"
        earlier, self._reports = self._reports, [report]
        try:
            if state:
                self._folder.mkdir(parents=True, exist_ok=True)
                partial = self._folder / f".{report.name}"
                partial.write_text(doing if state == _HANGS else "")  # the text of others is not read
                partial.replace(report)
        except OSError as error:
            self._say(f"{self._own_name} {doing}. Its report cannot be saved: {error.strerror}.")
            earlier = [report for report in earlier if f".{_WORKS}." not in report.name]  # these expire
        for report in earlier:
            try:
                report.unlink(missing_ok=True)
            except OSError:
                self._reports.append(report)  # and is removed later

    def _look(self, limit: float) -> dict[int, tuple[str, Path]]:
        """Return each rank's state and last report; an answer that is older than the limit is none."""
        with contextlib.suppress(OSError):  # then what was found before counts
            self._seen = {file: self._seen.get(file, self._now) for file in self._folder.iterdir()}
        found = [report for report in self._seen if report.match("rank_*.*.*")]
        return {
            int(report.name.split(".")[0].removeprefix("rank_")): (report.name.split(".")[1], report)
            for report in sorted(found, key=lambda report: int(report.suffix[1:]))
            if f".{_WORKS}." not in report.name or self._now - self._seen[report] < limit
        }

    def _decide(self, progress: Progress, silent: float) -> dict[int, tuple[str, Path]] | None:
        """Return the reports, if by them no rank can go on; the first watchdog to find so says why."""
        self._next_look = self._now + max(_POLL_SECONDS, len(self._hosts) / _LOOKS_PER_SECOND)
        reports = self._look(progress.limit)
        of_hang = sorted(found for found in reports.values() if found[0] != _WORKS)  # "hangs" before "waits"
        decided = self._folder / f"decided.{of_hang[0][1].name if of_hang else ''}"  # none of a later hang
        # Ranks that have not reported may be at work, on a batch of the evaluation that takes them longer.
        is_complete = len(of_hang) == len(self._hosts)
        is_late = len(of_hang) == len(reports) and silent > 2 * progress.limit
        latest = max((self._seen[report] for _, report in of_hang), default=self._now)
        is_clear = any(state == _HANGS for state, _ in of_hang) and self._now - latest >= _MISSING_SECONDS
        if not (is_complete or is_late or is_clear or decided in self._seen):
            return None
        try:
            decided.touch(exist_ok=False)
        except FileExistsError:
            return reports
        except OSError:  # the folder cannot be written: each says it
            pass
        self._say(self._message(progress, reports))
        return reports

    def _message(self, progress: Progress, reports: dict[int, tuple[str, Path]]) -> str:
        """Name the ranks that the others wait for."""
        names = []
        for rank, host in enumerate(self._hosts):
            state, report = reports.get(rank, ("", Path()))
            if state == _HANGS:
                with contextlib.suppress(OSError):  # it goes on
                    names.append(f"rank {rank} on {host} {report.read_text()}")
            elif not state:
                names.append(f"rank {rank} on {host} gives no report: has its host failed?")
        states = [state for state, _ in reports.values()]
        goes_on = self._go_on and _HANGS in states
        ended = "the run goes on without these ranks" if goes_on else "this run is ended"
        resume = "" if goes_on else " Resume with --resume auto."
        return (
            f"error: no step has ended for {progress.limit:g} s (--hang-timeout), so {ended}: "
            f"{'; '.join(names) or f'all ranks wait, {progress.doing}'}; {states.count(_WAITS)} of "
            f"{len(self._hosts)} ranks wait for others. Their stacks are in {self._folder}.{resume}"
        )

    def _stopped_state(self) -> str:
        """Return why the rank does not run, if the kernel says so."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8", errors="replace")
            return _STATES.get(stat.rpartition(") ")[2][:1], "")
        return ""

    def _dump(self) -> bytes:
        """Return the stacks of the rank's threads, which it writes itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, DUMP)
        limit = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < limit and not os.fstat(self._stacks).st_size:
            time.sleep(0.05)
        time.sleep(0.1)  # until they are complete
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher may have ended, and must not keep this from killing
            print(text, file=sys.stderr, flush=True)


def main(pid: int, told: int, heartbeat: int, **watched: Any) -> None:
    """Watch the rank until it ends: then nobody holds the other end of the pipe `told`."""
    memory, watch = Heartbeat(heartbeat), Watch(pid=pid, **watched)
    threading.Thread(target=watch.end_without_folder, args=(memory,), daemon=True).start()
    with os.fdopen(told, "rb", buffering=0) as lines:  # `select` does not see what a buffer holds
        while os.getppid() == pid:
            if select.select([lines], [], [], _POLL_SECONDS)[0]:
                if not (line := lines.readline()):
                    return
                watch.begin(**json.loads(line))
            elif watch.check(memory.read()):
                return
