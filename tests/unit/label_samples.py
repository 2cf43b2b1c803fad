"""Image folders without pixels, and label maps for them, for tests of what reads labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.labels.keys import key_of, keys_of
from horovod_volo.data.labels.store import StoreFacts
from horovod_volo.data.labels.store_writer import begin


def catalog_of(root: Path, *names: str) -> Catalog:
    """Make empty files under the names "CLASS/FILE" of training images, and list them."""
    for name in names:
        file = root / "train" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return build_catalog(str(root), "train", None)


def published_map(
    seed: int = 0, *, k: int = 5, height: int = 6, width: int = 9, classes: int = 1000
) -> torch.Tensor:
    """Return a random label map as it is published."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(k, height, width, generator=random)
    ids = torch.randint(0, classes, (k, height, width), generator=random)
    return torch.stack([logits, ids.float()]).half()


def save(content: object, file: Path) -> None:
    """Save anything with torch, making the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def publish(root: Path, catalog: Catalog, **shape: int) -> Path:
    """Save a map for each image of a catalog, seeded by its place."""
    for index in range(len(catalog)):
        content = published_map(index, classes=len(catalog.classes), **shape)
        save(content, root / f"{key_of(catalog.name(index))}.pt")
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
) -> StoreFacts:
    """Write a store of these maps."""
    making = begin(
        folder,
        keys,
        classes=classes,
        size=scores.shape[1:],
        geometry="whole",
        teacher="a test",
        catalog=digest,
        shard_rows=shard_rows,
    )
    for number in range(making.shards):
        own = slice(making.rows(number).start, making.rows(number).stop)
        making.write(number, scores[own], ids[own].astype(making.facts.ids), [])
    return making.finish()


def random_store(folder: Path, catalog: Catalog, **how: object) -> tuple[np.ndarray, np.ndarray]:
    """Write a store of random maps for a catalog's images and return what is in it."""
    random = np.random.default_rng(0)
    shape = (len(catalog), 2, 3, 4)
    scores = random.normal(size=shape).astype(np.float16)
    ids = random.integers(0, len(catalog.classes), shape)
    make_store(folder, keys_of(catalog), scores, ids, classes=len(catalog.classes), **how)
    return scores, ids
