"""Collects made-up predictions of this rank's images, and writes what the worst classes are."""

import argparse
from pathlib import Path

import numpy as np
import torch

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.engine.accuracy import PredictionCollector, find_confusions
from horovod_volo.engine.pictures import draw_confusions

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("images")
    options = parser.parse_args()
    world = World.connect()
    catalog = build_catalog(options.images, "val", None)
    random = np.random.default_rng(0)
    classes = random.integers(0, len(catalog.classes), size=len(catalog))
    shares = random.random(len(catalog), dtype=np.float32)
    targets = np.where(np.arange(len(catalog)) % 6 == 0, NO_CLASS, catalog.targets)  # some are damaged
    collector = PredictionCollector()
    own = np.arange(world.rank, len(catalog), world.size)
    for indices in np.split(own, range(BATCH, len(own), BATCH)):
        batch = EvalBatch(torch.empty(0), torch.from_numpy(targets[indices].astype(np.int64)), indices)
        collector.add(batch, torch.from_numpy(classes[indices]), torch.from_numpy(shares[indices]))
    confusions = find_confusions(catalog, *collector.gather(world, len(catalog)))
    pictures = draw_confusions(catalog, confusions)
    torch.save(
        {"confusions": confusions, "pictures": {name: each.png for name, each in pictures.items()}},
        options.out / f"rank_{world.rank}.pt",
    )


if __name__ == "__main__":
    main()
