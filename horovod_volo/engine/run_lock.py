"""The lock of a run folder: a file with the process that trains into it. Only rank 0 has one.

Its owner rewrites it every few seconds. The lock of a process that has ended is taken over: at once if the
process was on this host since it was booted, otherwise when the file no longer changes. No clocks are
compared, because those of hosts and file servers differ.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import make_folder
from horovod_volo.core.errors import UserError, print_error

_REFRESH_SECONDS = 5.0
_STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_UNREADABLE = (OSError, ValueError, AttributeError)  # a lock that is not there, or is damaged
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RunLock:
    """The lock of a run folder, from the constructor to `close`."""

    def __init__(self, folder: Path, job: str = "", in_job: Callable[[], bool] = lambda: True) -> None:
        """Take the lock; raise UserError if another process has it. The folder is made.

        `job` names a job that has one rank 0 at a time: it takes the lock of the one before. A process that
        was stopped for long may be the one before; `in_job` returns whether this one is still in the job.
        """
        make_folder(folder)
        self._path, self._owner, self._in_job = folder / "lock.json", _this_process() | {"job": job}, in_job
        while not self._take():
            self._remove_if_stale()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="run lock", daemon=True)
        self._thread.start()
        if not in_job():  # the lock was free
            self.close()
            raise UserError(f"Run folder {folder} is that of other ranks of this job by now.")

    def check(self) -> None:
        """Raise UserError if another process has taken the lock: this one must not write any more."""
        if not self._path.parent.exists():  # somebody removed the folder: it is made again
            make_folder(self._path.parent)
            self._take()
        owner = _read(self._path, missing={"id": ""})
        if owner is not None and not self._is_own(owner):
            raise UserError(
                f"Run folder {self._path.parent} was taken over by {_name(owner)}, because this process did "
                f"not answer for {_STALE_SECONDS:g} s. Nothing more is written here."
            )

    def close(self) -> None:
        """Release the lock."""
        self._closed.set()
        self._thread.join()
        if self._is_own(_read(self._path)):
            self._path.unlink(missing_ok=True)

    def _is_own(self, owner: dict[str, Any] | None) -> bool:
        return owner is not None and owner["id"] == self._owner["id"]

    def _take(self) -> bool:
        """Create the file, complete, unless there is one. A hard link is atomic, on NFS too."""
        partial = self._path.with_name(f".{self._path.name}.{self._owner['id']}")
        partial.write_text(json.dumps(self._owner), encoding="utf-8")
        try:
            os.link(partial, self._path)
        except OSError as error:
            # Over NFS a link that was made may be reported as failed; on some file systems there are none.
            made = partial.stat().st_nlink == 2
            return made or (not isinstance(error, FileExistsError) and self._take_without_link())
        finally:
            partial.unlink()
        return True

    def _take_without_link(self) -> bool:
        with contextlib.suppress(FileExistsError), self._path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(self._owner))
            return True
        return False

    def _remove_if_stale(self) -> None:
        """Remove the lock of a process that has ended; raise UserError if it has not."""
        owner = _read(self._path)
        if owner is None or self._has_ended(owner):
            # Renamed first: of two processes that find it stale, only one removes this file.
            stale = self._path.with_name(f".{self._path.name}.{self._owner['id']}.stale")
            try:
                self._path.rename(stale)
            except FileNotFoundError:
                return
            if _read(stale) != owner:  # another process took the lock after it was read: give it back
                with contextlib.suppress(FileExistsError):
                    os.link(stale, self._path)
            stale.unlink()
            return
        raise UserError(
            f"Run folder {self._path.parent} is in use by {_name(owner)}. Wait until it ends, or give this "
            "run another --name."
        )

    def _has_ended(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner has ended; on another host or in a container, wait for its next change."""
        if owner.get("job") and owner["job"] == self._owner["job"]:
            return self._in_job()  # after the owner was read, which is compared when it is removed
        # Hosts, and containers, may have the same name; no two have been booted alike.
        if all(owner[key] == self._owner[key] for key in ("host", "boot", "processes")):
            return bool(_start_time(owner["pid"]) != owner["started"])
        print_error(f"waiting to see whether {_name(owner)} still trains here")
        limit = time.monotonic() + _STALE_SECONDS
        while time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
            if _read(self._path) != owner:
                return False
        return True

    def _refresh(self) -> None:
        while not self._closed.wait(_REFRESH_SECONDS):
            # In place and as long as before: a lock that another process takes meanwhile is another file, and
            # nobody reads half of this one. If the folder is gone or the disk is full, others report it.
            with contextlib.suppress(*_UNREADABLE), self._path.open("r+", encoding="utf-8") as file:
                if self._is_own(_parse(file.read())):
                    self._owner["refreshed"] = uuid.uuid4().hex
                    file.seek(0)
                    file.write(json.dumps(self._owner))
                    file.truncate()


def _this_process() -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "boot": _BOOT_ID.read_text(encoding="utf-8").strip(),
        "processes": str(Path("/proc/self/ns/pid").readlink()),  # a container has numbers of its own
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "refreshed": uuid.uuid4().hex,
    }


def _start_time(pid: int) -> str:
    """Return when a process was started, in ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(") ")[2].split()[19]


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}" if owner["id"] else "a process that has ended"


def _read(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return what the lock says; None if it is damaged."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except _UNREADABLE:
        return None


def _parse(text: str) -> dict[str, Any] | None:
    owner = json.loads(text)
    return owner if {"id", "host", "boot", "processes", "pid", "started"} <= owner.keys() else None
