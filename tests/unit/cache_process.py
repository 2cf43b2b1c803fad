"""A process that reads a file through a cache of blocks, for a test with several; it imports little."""

from contextlib import suppress
from pathlib import Path

from horovod_volo.remote import remote_folder
from horovod_volo.remote.remote_folder import BlockCache, RemoteFolder

BLOCK = 4096


def used_bytes(cache: Path) -> int:
    """Return the bytes of all files; those that another process deletes meanwhile do not count."""
    total = 0
    for path in (cache / "blocks").rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def read_all(address: str, cache: Path, limit: int, order: list[int]) -> None:
    """Read `file` by parts through a cache; runs in a process of its own."""
    remote_folder.BLOCK_BYTES = BLOCK
    folder, blocks = RemoteFolder(address), BlockCache(cache, limit)
    for number in order:
        content = blocks.read(folder, "file", number * 1000, 1000)
        assert content == bytes([number % 251]) * 1000, number
        assert used_bytes(cache) <= limit
