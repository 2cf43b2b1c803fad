#!/usr/bin/env python3
"""Remove the code for other GPUs from shared libraries, so that the libraries compress well.

    python tools/reduce_gpu_code.py FOLDER --keep 90

A library of CUDA programs holds each program for many architectures, in a fat binary: a header, then an entry
of machine code or PTX for each architecture. The entries that remain are moved to the front of their fat
binary, its header gets their size, and the rest becomes zeros. The size of the file does not change.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from pathlib import Path

_MAGIC = (0xBA55ED50).to_bytes(4, "little")
_FAT_BINARY = struct.Struct("<4sHHQ")  # magic, version, bytes of this header, bytes of all entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of the code, architecture
_PTX, _MACHINE_CODE = 1, 2
_MB = 10**6


def reduce_fat_binaries(library: bytearray | mmap.mmap, keep: int) -> int:
    """Remove code that a GPU of architecture `keep` cannot run, in place; return how many bytes became zeros.

    A fat binary without any code for this GPU is not changed. ValueError if one is not understood.
    """
    removed = 0
    start = library.find(_MAGIC)
    while start >= 0:
        end = start + 1  # where to search on: the four bytes may be there by chance
        if start + _FAT_BINARY.size <= len(library):
            magic, version, header_bytes, entry_bytes = _FAT_BINARY.unpack_from(library, start)
            first, past = start + header_bytes, start + header_bytes + entry_bytes
            if version == 1 and header_bytes == _FAT_BINARY.size and past <= len(library):
                kept = b"".join(_entries_for(keep, library, first, past))
                if kept:
                    _FAT_BINARY.pack_into(library, start, magic, version, header_bytes, len(kept))
                    library[first:past] = kept + bytes(entry_bytes - len(kept))
                    removed += entry_bytes - len(kept)
                end = past
        start = library.find(_MAGIC, end)
    return removed


def _entries_for(gpu: int, library: bytearray | mmap.mmap, entry: int, past: int) -> list[bytes]:
    """Return the entries of a fat binary that a GPU can run: PTX for no newer one, or machine code.

    Machine code runs on GPUs of the same major version and of the same or a newer minor version.
    """
    found = []
    while entry < past:
        end = past + 1
        if entry + _ENTRY.size <= past:
            kind, _, header_bytes, size, architecture = _ENTRY.unpack_from(library, entry)
            end = entry + max(header_bytes, _ENTRY.size) + size
        if end > past:
            raise ValueError(f"the fat binary that ends at byte {past} is not understood")
        same_generation = architecture // 10 == gpu // 10
        if kind not in (_PTX, _MACHINE_CODE) or (architecture <= gpu and (kind == _PTX or same_generation)):
            found.append(bytes(library[entry:end]))
        entry = end
    return found


def reduce_library(path: Path, keep: int) -> int:
    """Remove code for other GPUs from one library; return how many bytes."""
    if not path.stat().st_size:
        return 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        return reduce_fat_binaries(library, keep)


def main() -> None:
    """Reduce all libraries of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=int, required=True, metavar="90", help="the GPU's architecture")
    args = parser.parse_args()
    libraries = [path for path in args.folder.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    for path in sorted(libraries):
        size, removed = path.stat().st_size, reduce_library(path, args.keep)
        if removed:
            print(f"{path.name}: {size / _MB:.0f} MB, {removed / _MB:.0f} MB of it for other GPUs")


if __name__ == "__main__":
    main()
