"""Code for other GPUs is removed from libraries; code for the GPU at hand and everything else stay."""

from __future__ import annotations

import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REDUCE = runpy.run_path(str(ROOT / "tools" / "reduce_gpu_code.py"))["reduce_fat_binaries"]
PTX, MACHINE_CODE, OTHER = 1, 2, 16
MAGIC = struct.pack("<I", 0xBA55ED50)


def entry(kind: int, architecture: int, header_bytes: int = 64) -> bytes:
    code = b"code %d for %d" % (kind, architecture)
    header = struct.pack("<HHIQIIHHI", kind, 0x101, header_bytes, len(code), 0, 0, 0, 0, architecture)
    return header.ljust(header_bytes, b"\1") + code


def fat_binary(*entries: bytes, zeros: int = 0) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + bytes(zeros)


def library(*fat_binaries: bytes) -> bytes:
    """Return a file with fat binaries, and with the magic number by chance before, between and after them."""
    return b"".join(b"code of the host" + MAGIC + b"\xff" * 40 + each for each in (*fat_binaries, MAGIC))


def test_code_for_other_gpus_is_removed() -> None:
    other = [entry(MACHINE_CODE, 80), entry(MACHINE_CODE, 100, header_bytes=80), entry(PTX, 120)]
    kept = [entry(MACHINE_CODE, 90, header_bytes=96), entry(PTX, 75), entry(OTHER, 0)]
    for_old_gpus = fat_binary(entry(MACHINE_CODE, 50), entry(MACHINE_CODE, 60))
    mixed = fat_binary(other[0], kept[0], kept[1], other[1], other[2], kept[2])
    content = bytearray(library(mixed, for_old_gpus, mixed))
    zeros = len(b"".join(other))
    assert REDUCE(content, 90) == 2 * zeros
    assert content == library(fat_binary(*kept, zeros=zeros), for_old_gpus, fat_binary(*kept, zeros=zeros))
    assert REDUCE(content, 90) == 0


@pytest.mark.parametrize(("gpu", "kept"), [(86, {80, 86}), (80, {80}), (90, {90}), (103, {100, 103})])
def test_code_for_an_older_gpu_of_the_same_generation_is_kept(gpu: int, kept: set[int]) -> None:
    architectures = (75, 80, 86, 89, 90, 100, 103, 120)
    content = bytearray(fat_binary(*(entry(MACHINE_CODE, each) for each in architectures)))
    REDUCE(content, gpu)
    assert {each for each in architectures if b"for %d" % each in content} == kept


@pytest.mark.parametrize("size", [3, 200, 2**40])
def test_entries_that_are_not_understood_are_an_error(size: int) -> None:
    content = bytearray(fat_binary(entry(MACHINE_CODE, 80)))
    struct.pack_into("<Q", content, 16 + 8, size)
    with pytest.raises(ValueError, match="not understood"):
        REDUCE(content, 90)


def test_all_libraries_of_a_folder_are_reduced_and_nothing_else(tmp_path: Path) -> None:
    entries = entry(MACHINE_CODE, 80), entry(MACHINE_CODE, 90)
    original, reduced = fat_binary(*entries), fat_binary(entries[1], zeros=len(entries[0]))
    (tmp_path / "dali").mkdir()
    (tmp_path / "dali" / "empty.so").touch()
    expected = {"dali/libdali.so": reduced, "dali/libnvjpeg.so.12": reduced, "dali/README": original}
    for name in expected:
        (tmp_path / name).write_bytes(original)
    (tmp_path / "linked.so").symlink_to(tmp_path / "dali" / "README")
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reduce_gpu_code.py"), str(tmp_path), "--keep", "90"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected
