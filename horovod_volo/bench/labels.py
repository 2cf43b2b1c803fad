"""How long it takes to read one label map: from the packed store, and from published files by torch.load.

Maps of the published shape are read in a random order, after each has been read once: what is compared is
the work, not the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.agreement import WrongResultError
from horovod_volo.bench.pairs import Block, alternate
from horovod_volo.bench.random_labels import TOP
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import images_nowhere
from horovod_volo.core.errors import UserError
from horovod_volo.data.labels.import_maps import import_labels
from horovod_volo.data.labels.store import LabelStore

_CELLS = 18  # a side of the published maps
_CLASSES = 1000
_MICROSECONDS = 1e6
_OURS_READ_AGAIN = 20  # times in a block, to make it as long as the peer's


def measure(*, maps: int, pairs: int) -> Result:
    """Measure so many maps, made for this in a temporary folder."""
    if maps < 2:
        raise UserError("--maps takes 2 or more.")
    source = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        published, packed = Path(folder) / "published", Path(folder) / "packed"
        paths = _write(published / "0", maps, source)
        catalog = images_nowhere(maps, _CLASSES)
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
        result = alternate(_ours(store, order), _peer(paths, order), pairs)
        store.close()
    return Result(
        "labels",
        f"reading one label map, {TOP} x {_CELLS} x {_CELLS}, of {maps:,}",
        [
            Figure.of("packed store", [_MICROSECONDS * seconds for seconds in result.ours], "µs"),
            Figure.of("torch.load", [_MICROSECONDS * seconds for seconds in result.peer], "µs"),
            Figure.of_estimate("faster than torch.load", result.times_faster, "x"),
        ],
    )


def _write(folder: Path, maps: int, source: np.random.Generator) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.pt" for number in range(maps)]
    for path in paths:
        logits = source.normal(size=(TOP, _CELLS, _CELLS)).astype(np.float16)
        ids = source.integers(_CLASSES, size=logits.shape).astype(np.float16)
        torch.save(torch.from_numpy(np.stack([logits, ids])), path)
    return paths


def _ours(store: LabelStore, order: Sequence[int]) -> Block:
    def block() -> float:
        began = perf_counter()
        for _ in range(_OURS_READ_AGAIN):
            for index in order:
                store.read(index)
        return (perf_counter() - began) / (_OURS_READ_AGAIN * len(order))

    return block


def _peer(paths: Sequence[Path], order: Sequence[int]) -> Block:
    def block() -> float:
        began = perf_counter()
        for index in order:
            _loaded(paths[index])
        return (perf_counter() - began) / len(order)

    return block


def _loaded(path: Path) -> NDArray[np.float16]:
    loaded: NDArray[np.float16] = torch.load(path, weights_only=True).numpy()
    return loaded


def _assert_same_maps(store: LabelStore, paths: Sequence[Path], order: Sequence[int]) -> None:
    for index in order:
        logits, ids = _loaded(paths[index])
        scores, numbers = store.read(index)
        if not ((scores == logits).all() and (numbers == ids).all()):
            raise WrongResultError(
                f"The packed map {index} is not that of the file {paths[index]}. Nothing was measured."
            )
