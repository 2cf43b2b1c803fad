"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed.

The file beside has a name of its own in every process, so that several may publish the same file at once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def remove_partials(folder: Path) -> None:
    """Remove what killed processes were writing in a folder; nobody may be writing there now."""
    for left in folder.glob(".*.partial"):
        left.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; it appears at `path` when the block ends, and never if the block raises."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # a temporary file is its maker's alone
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
