"""What the readers of the shard formats share: the sample, the walk over records, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import Form
from horovod_volo.data.images.split_folder import index_beside

Label = int | str  # class number or name


class ShardSample(NamedTuple):
    """One image of a shard."""

    label: Label
    name: str
    offset: int
    length: int
    form: Form = Form.BYTES


def record_ranges(
    shard: Path, size: int, starts_in: Callable[[Path], Iterable[int]], end_of: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record, from the shard's index if it has one, else sequentially.

    `end_of` returns the end of the record at an offset; it raises ValueError without a complete record.
    """
    index = index_beside(shard)
    if index.is_file():
        for start in starts_in(index):
            try:
                yield start, end_of(start)
            except ValueError as error:
                raise wrong_index(index, f"does not fit: {error} at byte {start}") from None
        return
    start = 0
    while start < size:
        try:
            end = end_of(start)
        except ValueError as error:
            raise damaged(shard, f"is damaged: {error} at byte {start} of {size}") from None
        yield start, end
        start = end


def check_name(shard: Path, name: str) -> None:
    """Raise UserError for a name by which a file would be written outside the folder that it is meant for."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise damaged(shard, f"has {name!r}, which is no name inside a folder")


def damaged(shard: Path, what: str) -> UserError:
    """Return the error for a damaged shard, with the remedy."""
    return UserError(f"{shard} {what}. Copy this shard again, or make it again.")


def wrong_index(index: Path, what: str) -> UserError:
    """Return the error for an index that does not match its shard, with the remedy."""
    return UserError(
        f"{index} {what}. Make this index again for the shard beside it, or remove it: without an index the "
        "shard is searched through."
    )
