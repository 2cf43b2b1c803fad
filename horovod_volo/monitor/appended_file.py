"""A file that records are appended to, and that lacks nothing after a time in which it could not be written.

Invariant: what was appended is written in its order, each part once.
"""

from __future__ import annotations

from pathlib import Path


class AppendedFile:
    """A file that is appended to. What cannot be written now is kept, and written with what comes next."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        """`header` is what a new file begins with."""
        self.path, self._header = path, header
        self._kept = bytearray()

    @property
    def lacks(self) -> int:
        """Return the number of bytes that are not in the file yet."""
        return len(self._kept)

    def append(self, content: bytes) -> None:
        """Append; raise OSError if that is not possible now. A file that was removed is made again."""
        self._kept += content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            if not file.tell():
                self._kept[:0] = self._header
            while self._kept:
                del self._kept[: file.write(self._kept)]
