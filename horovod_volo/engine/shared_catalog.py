"""One list of images for all ranks: made by one, opened by the others."""

from __future__ import annotations

from pathlib import Path

from horovod_volo.cluster.world import World
from horovod_volo.data.images.catalog import Catalog, build_catalog, open_catalog
from horovod_volo.data.images.split_folder import Split


def folder_for_lists(chosen: str, output: str, world: World) -> Path | None:
    """Return where lists of images are kept: as chosen, else beside the runs in `output`."""
    if chosen:
        return Path(chosen)
    # A rank that is alone shares its list with nobody, and leaves no file where none was asked for.
    return Path(output) / "catalogs" if world.size > 1 else None


def shared_catalog(data_dir: str, split: Split, folder: Path | None, world: World) -> Catalog:
    """List a split's images on rank 0, into `folder`; open that list on the others. Collective.

    Without a folder the list is in memory: for a rank that is alone.
    """
    built = world.run_on_all_ranks(
        lambda: build_catalog(data_dir, split, folder) if world.is_rank_zero else None
    )
    path, digest = world.broadcast_object(None if built is None else (built.path, built.digest))
    return world.run_on_all_ranks(lambda: open_catalog(path, digest) if built is None else built)
