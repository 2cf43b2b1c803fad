"""One list of images for all ranks: rank 0 writes it, the other ranks open it.

Training, evaluation and labelling use it. It is not in `data`, which does not depend on ranks.
"""

from __future__ import annotations

from pathlib import Path

from horovod_volo.cluster.world import World
from horovod_volo.data.images.catalog import Catalog, build_catalog, open_catalog
from horovod_volo.data.images.split_folder import HeldOut, Split


def catalog_folder(catalog_dir: str, output: str, world: World) -> Path | None:
    """Return the folder for lists of images: `catalog_dir`, else one in `output`; None: in memory."""
    if catalog_dir:
        return Path(catalog_dir)
    # A single rank has no other rank to share its list with, and writes no file that was not requested.
    return Path(output) / "catalogs" if world.size > 1 else None


def shared_catalog(
    data_dir: str, split: Split, folder: Path | None, world: World, held_out: HeldOut | None = None
) -> Catalog:
    """List a split's images on rank 0 and open that list on all ranks. Collective: every rank calls this.

    The list is a file in `folder`; None keeps it in memory, which needs a world of one rank.
    """
    built = world.run_on_all_ranks(
        lambda: build_catalog(data_dir, split, folder, held_out) if world.is_rank_zero else None
    )
    path, digest = world.broadcast_object(None if built is None else (built.path, built.digest))
    return world.run_on_all_ranks(lambda: open_catalog(path, digest) if built is None else built)
