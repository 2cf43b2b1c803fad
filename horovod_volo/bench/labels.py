"""Reading one label map: from the packed store, and from published files by torch.load.

Maps of the published shape are read in a random order, after each has been read once: the work is compared,
not the disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import WrongResultError, compare
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import CLASSES, MAP_SIDE, TOP, catalog_without_files
from horovod_volo.config.arguments import whole_number
from horovod_volo.labelling.import_maps import import_labels
from horovod_volo.token_labels.store import LabelStore


def measure(
    *, maps: Annotated[int, Flag("label maps to generate", read=whole_number(2))] = 2000, pairs: Pairs = 7
) -> Result:
    """Measure so many maps, generated in a temporary folder."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        published, packed = Path(folder) / "published", Path(folder) / "packed"
        (published / "0").mkdir(parents=True)
        paths = [published / "0" / f"{number}.pt" for number in range(maps)]
        for path in paths:
            logits = random.normal(size=(TOP, MAP_SIDE, MAP_SIDE)).astype(np.float16)
            ids = random.integers(CLASSES, size=logits.shape).astype(np.float16)
            torch.save(torch.from_numpy(np.stack([logits, ids])), path)
        catalog = catalog_without_files(maps, CLASSES)
        import_labels(
            published, packed, catalog, classes=CLASSES, workers=1, fail_on_bad_samples=True,
            progress=lambda *_: None, warn=lambda _: None,
        )  # fmt: skip
        store = LabelStore(packed, catalog, cache=None)
        order = random.permutation(maps).tolist()
        for index in order:
            if not np.array_equal(np.stack(store.read(index)), _load(paths[index])):
                raise WrongResultError(
                    f"The packed map {index} is not that of the file {paths[index]}. Nothing was measured."
                )
        found = compare(
            lambda: [store.read(index) for index in order],
            lambda: [_load(paths[index]) for index in order],
            torch.device("cpu"),
            pairs,
        )
        store.close()
    return Result(
        "labels",
        f"reading one label map, {TOP} x {MAP_SIDE} x {MAP_SIDE}, of {maps:,}",
        [
            Figure.of_seconds("packed store", found.ours / maps, "µs"),
            Figure.of_seconds("torch.load", found.peer / maps, "µs"),
            Figure.of("faster than torch.load", found.ratios, "x"),
        ],
    )


def _load(path: Path) -> NDArray[np.float16]:
    loaded: NDArray[np.float16] = torch.load(path, weights_only=True).numpy()
    return loaded
