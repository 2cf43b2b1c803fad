"""The images of a run of classification, their classes and their labels: listed, checked and described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.images.catalog import Catalog, ImageList, build_catalog, check_same_classes
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.engine.shared_catalog import cache_settings, cache_warnings, catalog_folder, shared_catalog
from horovod_volo.engine.task import check_classes
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.loss import BALANCED, ClassWeights, check_threshold, read_class_weights
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry
from horovod_volo.token_labels.keys import check_published_keys
from horovod_volo.token_labels.source import LabelSource, map_warnings, open_labels


@dataclass(frozen=True)
class Images:
    """The lists of training and validation images, and the label maps of the training images."""

    train: ImageList
    held_out: ImageList
    label_maps: LabelSource | None
    class_weights: ClassWeights | None = None

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self.held_out.close()
        if self.label_maps is not None:
            self.label_maps.close()

    def describe(self, config: Config) -> str:
        """Describe the images, their classes and their labels."""
        source = self.held_out.source
        is_share = source == self.train.source
        where = f"{100 * config.data.val_share:g} % of each class" if is_share else Path(source).name
        return (
            f"{len(self.train):,} training and {len(self.held_out):,} held-out images ({where}), "
            f"{class_counts(config, self.train)}; {labels_line(config, self.label_maps)}"
        )

    def warnings(self, config: Config) -> list[str]:
        """Return warnings about classes of equal size, label maps, and shards on a server."""
        found = balance_warnings(config, self.train) + cache_warnings(config.data, self.train)
        if self.label_maps is not None:
            found += map_warnings(config.objective.token_label_data, self.label_maps)
        return found


# Lists the training and held-out images of data sets that a program gives. Collective.
ReadLists = Callable[[Config, World], tuple[ImageList, ImageList]]


def read_images(config: Config, world: World, lists: ReadLists | None) -> Images:
    """List the images of a data folder, or of given data sets, and open the label maps. Collective."""
    train, held_out, label_maps = _lists(config, world, lists)

    def weights_of_classes() -> ClassWeights | None:
        check_threshold(config.objective, len(train.classes))
        return read_class_weights(config.objective.class_weights, train.classes, train.targets)

    return Images(train, held_out, label_maps, world.run_on_all_ranks(weights_of_classes))


def count_images(config: Config) -> tuple[int, int] | None:
    """Return the numbers of training images and classes; None if the data is on another machine."""
    if not Path(config.data.data_dir).exists():
        return None
    train = build_catalog(config.data.data_dir, "train", None, _held_out(config))
    return len(train), len(train.classes)


def _lists(
    config: Config, world: World, lists: ReadLists | None
) -> tuple[ImageList, ImageList, LabelSource | None]:
    if lists is not None:
        return (*lists(config, world), None)
    folder = catalog_folder(config.data.catalog_dir, config.run.output, world)
    train, held_out = (
        shared_catalog(
            config.data.data_dir, split, folder, world, _held_out(config), cache_settings(config.data)
        )
        for split in ("train", "val")
    )
    return train, held_out, world.run_on_all_ranks(partial(_open_label_maps, config, train, held_out))


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


def labels_line(config: Config, label_maps: LabelSource | None) -> str:
    """Describe the training labels."""
    if not config.objective.token_label:
        mixed = ", mixed in pairs of images by MixToken (--no-mix-token disables it)"
        return "class labels" + mixed * config.objective.mix_token
    side = tokens_per_side(config.model.model, config.model.img_size)
    if label_maps is None:
        return f"{side} x {side} token labels, the image's class on every token"
    geometry = f"{config.objective.label_geometry} geometry, maps of {label_maps.geometry.description}"
    return f"{side} x {side} token labels from {config.objective.token_label_data} ({geometry})"


def balance_warnings(config: Config, train: ImageList) -> list[str]:
    """Return a warning if classes are to be balanced that have equally many images."""
    is_balanced = len(set(np.bincount(train.targets).tolist())) == 1
    flags = ["--balance"] * bool(config.data.balance)
    flags += ["--class-weights balanced"] * (config.objective.class_weights == BALANCED)
    return [f"{flag} has no effect: all classes have equally many images" for flag in flags if is_balanced]


def class_counts(config: Config, train: ImageList) -> str:
    """Return the number of classes and, if some are to count more, how rare the rarest is."""
    counts = np.bincount(train.targets)
    rare = f" of {counts[counts > 0].min():,} to {counts.max():,} images"
    return (
        f"{len(train.classes):,} classes{rare * bool(config.data.balance or config.objective.class_weights)}"
    )
