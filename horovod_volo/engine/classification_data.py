"""The images of a run, their classes and their labels: listed once for all ranks, checked and described.

Rank 0 writes a list of images, the other ranks open it. Training, evaluation and labelling use that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config
from horovod_volo.core.names import Registry
from horovod_volo.data.images.catalog import Catalog, build_catalog, check_same_classes, open_catalog
from horovod_volo.data.images.split_folder import HeldOut, Split
from horovod_volo.engine.task import TaskData, check_classes
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.loss import check_threshold
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry
from horovod_volo.token_labels.keys import check_published_keys
from horovod_volo.token_labels.source import LabelSource, classes_warnings, map_warnings, open_labels


@dataclass(frozen=True)
class Images(TaskData):
    """The lists of training and validation images, and the label maps of the training images."""

    train: Catalog
    held_out: Catalog
    label_maps: LabelSource | None

    def close(self) -> None:
        self.train.close()
        self.held_out.close()
        if self.label_maps is not None:
            self.label_maps.close()

    def describe(self, config: Config) -> str:
        """Describe the images, their classes and their labels."""
        source, counts = self.held_out.source, np.bincount(self.train.targets)
        is_share = source == self.train.source
        where = f"{100 * config.data.val_share:g} % of each class" if is_share else Path(source).name
        classes = f"{len(self.train.classes):,} classes"
        if config.data.balance:
            classes += f" of {counts[counts > 0].min():,} to {counts.max():,} images"
        return (
            f"{len(self.train):,} training and {len(self.held_out):,} held-out images ({where}), "
            f"{classes}; {_labels_line(config, self.label_maps)}"
        )

    def warnings(self, config: Config) -> list[str]:
        """Return warnings about classes of equal size, label maps, and shards on a server."""
        found = cache_warnings(config.data, self.train)
        if config.data.balance and len(set(np.bincount(self.train.targets).tolist())) == 1:
            found.append("--balance has no effect: all classes have equally many images")
        if self.label_maps is not None:
            folder = config.objective.token_label_data
            found += map_warnings(folder, self.label_maps)
            found += classes_warnings(folder, self.label_maps, self.train)
        return found


def read_images(config: Config, world: World) -> Images:
    """List the images of the data folder and open the label maps. Collective: every rank calls this."""
    data = config.data
    folder = catalog_folder(data.catalog_dir, config.run.output, world)
    train, held_out = (
        shared_catalog(data.data_dir, split, folder, world, _held_out(config), data)
        for split in ("train", "val")
    )
    label_maps = world.run_on_all_ranks(partial(_open_label_maps, config, train, held_out))
    world.run_on_all_ranks(partial(check_threshold, config.objective, len(train.classes)))
    return Images(train, held_out, label_maps)


def count_images(config: Config) -> tuple[int, int] | None:
    """Return the numbers of training images and classes; None if the data is on another machine."""
    if not Path(config.data.data_dir).exists():
        return None
    train = build_catalog(config.data.data_dir, "train", None, _held_out(config))
    return len(train), len(train.classes)


def _held_out(config: Config) -> HeldOut:
    return HeldOut(config.data.val_split, config.data.val_share, config.run.seed)


def map_geometry(config: Config) -> MapGeometry | None:
    """Return the part of their images that the settings say label maps cover; None: as recorded."""
    if config.objective.label_geometry == "reference":
        return WHOLE
    geometry = config.objective.map_geometry
    return MapGeometry.parse(geometry) if geometry else None


def _open_label_maps(config: Config, train: Catalog, held_out: Catalog) -> LabelSource | None:
    """Check the classes of the images against each other and the settings; open the label maps, if any."""
    check_same_classes(train, held_out)
    check_classes(config, train, train.source)
    if not config.objective.token_label_data:
        return None
    cache = train.path.parent if train.path else None
    label_maps = open_labels(config.objective.token_label_data, train, cache, map_geometry(config))
    if held_out.source == train.source and not label_maps.generated:  # with --val-share
        check_published_keys(train, held_out)
    return label_maps


def _labels_line(config: Config, label_maps: LabelSource | None) -> str:
    """Describe the training labels."""
    if not config.objective.token_label:
        mixed = ", mixed in pairs of images by MixToken (--no-mix-token disables it)"
        return "class labels" + mixed * config.objective.mix_token
    side = tokens_per_side(config.model.model, config.model.img_size)
    if label_maps is None:
        return f"{side} x {side} token labels, the image's class on every token"
    geometry = f"{config.objective.label_geometry} geometry, maps of {label_maps.geometry.description}"
    return f"{side} x {side} token labels from {config.objective.token_label_data} ({geometry})"


class ImageSource(NamedTuple):
    """What lists the images of a data folder, or of shards at an address."""

    # (folder or address, split, which images are held out, folder of the list or memory, cache) -> the list
    build: Callable[[str, Split, HeldOut, Path | None, Data], Catalog]
    # (the list that another rank has written, its digest, folder or address, cache) -> the list
    open: Callable[[Path, str, str, Data], Catalog]


SERVERS: Registry[ImageSource] = Registry("address", "DATA_DIR")
_FOLDERS = ImageSource(
    lambda data_dir, split, held_out, folder, _: build_catalog(data_dir, split, folder, held_out),
    lambda path, digest, *_: open_catalog(path, digest),
)


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
    held_out: HeldOut = HeldOut(),  # noqa: B008  # it is frozen
    cache: Data = Data(),  # noqa: B008
) -> Catalog:
    """List a split's images on rank 0 and open that list on all ranks. Collective: every rank calls this.

    The list is a file in `folder`; None keeps it in memory, which needs a world of one rank. That of shards
    on a server is downloaded, and `cache` keeps blocks of them.
    """
    scheme, is_address, _ = data_dir.partition("://")
    source = world.run_on_all_ranks(lambda: SERVERS.find(scheme) if is_address else _FOLDERS)
    built = world.run_on_all_ranks(
        lambda: source.build(data_dir, split, held_out, folder, cache) if world.is_rank_zero else None
    )
    facts: Any = world.broadcast_object(None if built is None else (built.path, built.digest, built.source))
    path, digest, origin = facts
    return world.run_on_all_ranks(
        lambda: source.open(path, digest, origin, cache) if built is None else built
    )


def cache_warnings(settings: Data, train: Catalog) -> list[str]:
    """Return a warning if blocks of shards on a server are read again and again."""
    gib = getattr(train, "remote_bytes", 0) / 2**30
    if not settings.cache_dir or settings.block_shuffle or gib <= settings.cache_gib:
        return []
    return [
        f"--cache-gib {settings.cache_gib:g} holds a part of the {gib:.1f} GiB of the training shards, whose "
        "images are read in random order: most blocks are read many times. Add --block-shuffle, or raise it"
    ]
