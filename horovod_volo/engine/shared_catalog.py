"""One list of images for all ranks: rank 0 writes it, the other ranks open it.

Training, evaluation and labelling use it. It is not in `data`, which does not depend on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.names import Registry
from horovod_volo.data.images.catalog import Catalog, ImageList, build_catalog, open_catalog
from horovod_volo.data.images.split_folder import HeldOut, Split


class CacheSettings(NamedTuple):
    """The folder for blocks of remote shards, and its limit; without a folder, each image is one request."""

    folder: str = ""
    gib: float = 0.0


class ShardServer(NamedTuple):
    """What reads shards at an address."""

    # (address, split, which images are held out, folder or memory, cache) -> the downloaded list
    download: Callable[[str, Split, HeldOut, Path | None, CacheSettings], Catalog]
    open: Callable[[Path, str, str, CacheSettings], Catalog]  # (downloaded list, its digest, address, cache)


SERVERS: Registry[ShardServer] = Registry("address", "DATA_DIR")


def catalog_folder(catalog_dir: str, output: str, world: World) -> Path | None:
    """Return the folder for lists of images: `catalog_dir`, else one in `output`; None: in memory."""
    if catalog_dir:
        return Path(catalog_dir)
    # A single rank has no other rank to share its list with, and writes no file that was not requested.
    return Path(output) / "catalogs" if world.size > 1 else None


def shared_catalog(
    data_dir: str,
    split: Split,
    folder: Path | None,
    world: World,
    held_out: HeldOut | None = None,
    cache: CacheSettings | None = None,
) -> Catalog:
    """List a split's images on rank 0 and open that list on all ranks. Collective: every rank calls this.

    The list is a file in `folder`; None keeps it in memory, which needs a world of one rank. That of shards
    on a server is downloaded, and `cache` keeps blocks of them.
    """
    blocks, scheme = cache or CacheSettings(), data_dir.partition("://")[0]

    def build() -> Catalog:
        if scheme != data_dir:
            return SERVERS.find(scheme).download(data_dir, split, held_out or HeldOut(), folder, blocks)
        return build_catalog(data_dir, split, folder, held_out)

    def open_built(path: Path, digest: str, source: str) -> Catalog:
        if scheme != data_dir:
            return SERVERS.find(scheme).open(path, digest, source, blocks)
        return open_catalog(path, digest)

    built = world.run_on_all_ranks(lambda: build() if world.is_rank_zero else None)
    facts = world.broadcast_object(None if built is None else (built.path, built.digest, built.source))
    return world.run_on_all_ranks(lambda: open_built(*facts) if built is None else built)


def cache_settings(settings: Data) -> CacheSettings:
    """Return the settings of the blocks that are kept of shards on a server."""
    return CacheSettings(settings.cache_dir, settings.cache_gib)


def cache_warnings(settings: Data, train: ImageList) -> list[str]:
    """Return a warning if blocks of shards on a server are read again and again."""
    gib = getattr(train, "remote_bytes", 0) / 2**30
    if not settings.cache_dir or settings.block_shuffle or gib <= settings.cache_gib:
        return []
    return [
        f"--cache-gib {settings.cache_gib:g} holds a part of the {gib:.1f} GiB of the training shards, whose "
        "images are read in random order: most blocks are read many times. Add --block-shuffle, or raise it"
    ]
