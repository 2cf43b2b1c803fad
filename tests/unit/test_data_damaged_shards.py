"""A tar shard without an index that is cut, or partly zeroed, is refused: no image is lost unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.tar_shards import BLOCK_BYTES, tar_samples
from tests.unit.shard_writers import picture, write_tar

SAMPLES = 12


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    members = []
    for number in range(SAMPLES):
        members += [(f"{number:04}.jpg", picture(number)), (f"{number:04}.cls", b"3")]
    write_tar(tmp_path / "shard.tar", members)
    return tmp_path / "shard.tar"


def is_refused(shard: Path) -> bool:
    try:
        found = len(list(tar_samples(shard)))
    except UserError:
        return True
    assert found == SAMPLES
    return False


def test_a_cut_shard_is_refused_wherever_it_is_cut(shard: Path) -> None:
    content = shard.read_bytes()
    end = len(content.rstrip(b"\0"))
    end += -end % BLOCK_BYTES  # of the last member
    assert not is_refused(shard)
    for length in (*range(0, end + 1, BLOCK_BYTES), *range(100, end, 10 * BLOCK_BYTES)):
        shard.write_bytes(content[:length])
        assert is_refused(shard), length
    for length in range(end + BLOCK_BYTES, len(content), 4 * BLOCK_BYTES):
        shard.write_bytes(content[:length])
        assert not is_refused(shard), length  # only padding is missing


def test_a_shard_with_a_zeroed_header_is_refused(shard: Path) -> None:
    content = shard.read_bytes()
    for block in range(0, len(content.rstrip(b"\0")), BLOCK_BYTES):
        if content[block + 257 : block + 262] != b"ustar":
            continue
        for blocks in (1, 2):
            damaged = bytearray(content)
            damaged[block : block + blocks * BLOCK_BYTES] = bytes(blocks * BLOCK_BYTES)
            shard.write_bytes(damaged[: len(content)])
            assert is_refused(shard), (block, blocks)


def test_a_shard_with_another_one_after_its_end_is_refused(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() * 2)
    assert is_refused(shard)
