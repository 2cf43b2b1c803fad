"""Reading one label map: from the packed store, and from published files by torch.load.

Maps of the published shape are read in a random order, after each has been read once: the work is compared,
not the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import Block, WrongResultError, alternate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import MAP_SIDE, TOP, catalog_without_files
from horovod_volo.config.arguments import whole_number
from horovod_volo.data.labels.import_maps import import_labels
from horovod_volo.data.labels.store import LabelStore

_CLASSES = 1000
_REPEATS = 20  # of our reads in a block, to make it as long as the peer's


def measure(
    *, maps: Annotated[int, Flag("label maps to generate", read=whole_number(2))] = 2000, pairs: Pairs = 7
) -> Result:
    """Measure so many maps, generated in a temporary folder."""
    source = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        published, packed = Path(folder) / "published", Path(folder) / "packed"
        paths = _write(published / "0", maps, source)
        catalog = catalog_without_files(maps, _CLASSES)
        import_labels(
            published,
            packed,
            catalog,
            classes=_CLASSES,
            workers=1,
            fail_on_bad_samples=True,
            progress=lambda *_: None,
            warn=lambda _: None,
        )
        store = LabelStore(packed, catalog, cache=None)
        order = source.permutation(maps).tolist()
        _assert_same_maps(store, paths, order)
        ours = _block(store.read, _REPEATS * order)
        found = alternate(ours, _block(lambda index: _load(paths[index]), order), pairs)
        store.close()
    return Result(
        "labels",
        f"reading one label map, {TOP} x {MAP_SIDE} x {MAP_SIDE}, of {maps:,}",
        [
            Figure.of_seconds("packed store", found.ours, "µs"),
            Figure.of_seconds("torch.load", found.peer, "µs"),
            Figure.of_estimate("faster than torch.load", found.times_faster, "x"),
        ],
    )


def _write(folder: Path, maps: int, source: np.random.Generator) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.pt" for number in range(maps)]
    for path in paths:
        logits = source.normal(size=(TOP, MAP_SIDE, MAP_SIDE)).astype(np.float16)
        ids = source.integers(_CLASSES, size=logits.shape).astype(np.float16)
        torch.save(torch.from_numpy(np.stack([logits, ids])), path)
    return paths


def _block(read: Callable[[int], object], order: Sequence[int]) -> Block:
    def block() -> float:
        began = perf_counter()
        for index in order:
            read(index)
        return (perf_counter() - began) / len(order)

    return block


def _load(path: Path) -> NDArray[np.float16]:
    loaded: NDArray[np.float16] = torch.load(path, weights_only=True).numpy()
    return loaded


def _assert_same_maps(store: LabelStore, paths: Sequence[Path], order: Sequence[int]) -> None:
    for index in order:
        logits, ids = _load(paths[index])
        scores, numbers = store.read(index)
        if not ((scores == logits).all() and (numbers == ids).all()):
            raise WrongResultError(
                f"The packed map {index} is not that of the file {paths[index]}. Nothing was measured."
            )
