"""Reads ranges of bytes of files on a server: what HTTP and S3 share, and attempts after a failure.

Invariant: all bytes of a file are of one version. The first answer names the version and the size of the
whole file; a later one with others is an error, not data.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Protocol

from horovod_volo.core import liveness
from horovod_volo.core.errors import UserError

ATTEMPTS = 8
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 30.0
_PART_BYTES = 2**23  # of a file that is read whole


class FilePart(NamedTuple):
    """A range of bytes of a file, and facts of the whole file."""

    data: bytes
    size: int
    version: str  # empty: the server does not say


class TemporaryError(Exception):
    """A failure that may be over in a moment, such as a lost connection."""

    def __init__(self, what: str, pause: float = 0.0) -> None:
        """`pause` is the number of seconds that the server asks for."""
        super().__init__(what)
        self.pause = pause


class MissingError(UserError):
    """A file that the server does not have."""


class RefusedError(MissingError):
    """A file that the server does not give; one that it does not have, for who may not list its files."""


class RangeSource(Protocol):
    """A server of files."""

    def read(self, url: str, start: int, length: int) -> FilePart:
        """Return up to `length` bytes from `start`; fewer only at the end of the file. Thread-safe.

        Raise TemporaryError for what another attempt may mend, and UserError for anything else.
        """

    def close(self) -> None:
        """Close all connections."""


class RemoteFile:
    """A file on a server, read at any offset by any thread."""

    def __init__(self, source: RangeSource, url: str, size: int | None = None) -> None:
        """`size` is what the file must have, if a list says so."""
        self.url = url
        self._source, self._listed_size = source, size
        self._first: tuple[int, str] | None = None  # size and version in the first answer
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer only at the end of the file."""
        part = self._attempted(offset, length)
        if self._listed_size not in (None, part.size):
            raise UserError(
                f"{self.url} has {part.size:,} bytes, but its list says {self._listed_size:,}: it was "
                "changed. Upload the shards again, with the list that belongs to them."
            )
        with self._lock:
            self._first = self._first or (part.size, part.version)
        if self._first != (part.size, part.version):
            raise UserError(
                f"{self.url} was changed while it was read. Restart with --resume auto, when it is the "
                "file that the run began with."
            )
        return part.data

    def identity(self) -> str:
        """Return what identifies the file and its version; ask the server if it is not known yet."""
        size, version = self._facts()
        return f"{self.url} {size} {version}"

    def read_all(self) -> bytes:
        """Return the whole file."""
        parts = [self.read(0, _PART_BYTES)]
        size, _ = self._facts()
        for start in range(_PART_BYTES, size, _PART_BYTES):
            liveness.note_progress()
            parts.append(self.read(start, _PART_BYTES))
        return b"".join(parts)

    def _facts(self) -> tuple[int, str]:
        """Return the size and the version of the file."""
        if self._first is None:
            self.read(0, 1)
        assert self._first is not None
        return self._first

    def _attempted(self, offset: int, length: int) -> FilePart:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                part = self._source.read(self.url, offset, length)
                if len(part.data) != max(0, min(length, part.size - offset)):
                    raise TemporaryError(f"{len(part.data):,} bytes came instead of {length:,}")
            except TemporaryError as error:
                if attempt == ATTEMPTS:
                    raise UserError(
                        f"{self.url} cannot be read, in {ATTEMPTS} attempts; the last: {error}. Restart with "
                        "--resume auto when the server answers."
                    ) from error
                time.sleep(min(max(pause, error.pause), LONGEST_PAUSE_SECONDS))
                pause *= 2
            else:
                return part
        raise AssertionError
