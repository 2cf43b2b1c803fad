"""Image folders with empty files, shards of small images, and label maps for them."""

from pathlib import Path

import numpy as np
import torch
from shard_writers import picture, write_tar

from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.labelling.store_writer import open_writer
from horovod_volo.token_labels.keys import catalog_keys, label_key
from horovod_volo.token_labels.store import StoreMetadata


def touch(folder: Path, *names: str) -> None:
    """Create empty files and the folders that hold them."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def catalog_of(root: Path, *names: str) -> Catalog:
    """Create empty training images named "CLASS/FILE"; return their catalog."""
    touch(root / "train", *names)
    return build_catalog(str(root), "train", None)


def packed_catalog_of(root: Path, *names: str) -> Catalog:
    """Pack a training image for each of the names "CLASS/FILE" into a shard; return its catalog."""
    classes = sorted({name.partition("/")[0] for name in names})
    members = []
    for number, name in enumerate(names):
        label = str(classes.index(name.partition("/")[0])).encode()
        members += [(name, picture(number)), (f"{name.partition('.')[0]}.cls", label)]
    write_tar(root / "train" / "0.tar", members)
    (root / "train" / "classes.txt").write_text("\n".join(classes))
    return build_catalog(str(root), "train", None)


def published_map(
    seed: int = 0, *, k: int = 5, height: int = 6, width: int = 9, classes: int = 1000
) -> torch.Tensor:
    """Return a random label map in the published format."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(k, height, width, generator=random)
    ids = torch.randint(0, classes, (k, height, width), generator=random)
    return torch.stack([logits, ids.float()]).half()


def save(content: object, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def publish(root: Path, catalog: Catalog, **shape: int) -> Path:
    """Save a random published map for each image of a catalog, seeded by its index."""
    for index in range(len(catalog)):
        content = published_map(index, classes=len(catalog.classes), **shape)
        save(content, root / f"{label_key(catalog.name(index))}.pt")
    return root


def make_store(
    folder: Path,
    keys: list[str],
    scores: np.ndarray,
    ids: np.ndarray,
    *,
    classes: int,
    digest: str = "",
    shard_rows: int = 3,
    teacher: str = "a test",
    **options: bool,
) -> StoreMetadata:
    about = {"classes": classes, "map_shape": scores.shape[1:], "geometry": "whole", "teacher": teacher}
    writer = open_writer(folder, keys, catalog=digest, shard_rows=shard_rows, **about, **options)
    for number in range(writer.shards):
        own = slice(writer.rows(number).start, writer.rows(number).stop)
        writer.write(number, scores[own], ids[own].astype(writer.metadata.ids), [])
    return writer.finish()


def random_store(folder: Path, catalog: Catalog, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Write a store of random maps for a catalog's images; return logits and class numbers."""
    random = np.random.default_rng(0)
    shape = (len(catalog), 2, 3, 4)
    scores = random.normal(size=shape).astype(np.float16)
    ids = random.integers(0, len(catalog.classes), shape)
    make_store(folder, catalog_keys(catalog), scores, ids, classes=len(catalog.classes), **options)
    return scores, ids
