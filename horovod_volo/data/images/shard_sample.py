"""What a shard's reader says about one image in it, and what it says where the shard is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from horovod_volo.config.errors import UserError
from horovod_volo.data.images.catalog_file import Form

Label = int | str  # a class's number, or its name


class ShardSample(NamedTuple):
    """One image of a shard."""

    label: Label
    name: str
    offset: int
    length: int
    form: Form = Form.BYTES


def damaged(shard: Path, what: str) -> UserError:
    """Word what is wrong with a shard, with the remedy."""
    return UserError(f"{shard} {what}. Copy this shard again, or make it anew.")


def wrong_index(index: Path, what: str) -> UserError:
    """Word what is wrong with a shard's index, with the remedy."""
    return UserError(
        f"{index} {what}. Make this index again for the shard beside it, or remove it: without an index the "
        "shard is searched through."
    )
