"""Atomic file writes, and checksums of files: a temporary file is written, fsynced and renamed.

Readers see the old file, the new file or none, never a part of one. The temporary name is unique, so several
processes may write the same path at once.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from horovod_volo.core.errors import UserError

MayWrite = Callable[[], object]  # raises an error if this process must not write


def remove_partials(folder: Path) -> None:
    """Remove the temporary files of killed processes; nobody may be writing in this folder now."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path, may_write: MayWrite = lambda: None) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears at `path` when the block ends, and never if the block raises."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        may_write()
        partial.replace(path)  # impossible once another process has removed it
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they exist, so that their entries are on the disk."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def write_text(path: Path, text: str, flag: str) -> None:
    """Write the file that a flag names; raise UserError if that is impossible."""
    try:
        with atomic_write(path) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"{flag} cannot write {path}: {error.strerror}. Name another file.") from None


def flush(path: Path) -> None:
    """Call fsync on a file, or on a folder so that its entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal; the file is read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: dict[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of JSON whose layout is fixed."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
