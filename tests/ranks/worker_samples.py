"""Saves the training samples of this rank: indices, and hashes of pixels, labels and crop boxes."""

import hashlib
import sys
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainLoader
from horovod_volo.token_labels.source import open_labels


def main(out: Path, images: Path, global_batch: int) -> None:
    world = World.connect()
    catalog = build_catalog(str(images), "train", None)
    loader = TrainLoader(
        catalog,
        open_labels(str(images / "token_labels"), catalog, None),
        Data(batch_size=global_batch // world.size, vflip=0.3),
        image_size=32,
        seed=5,
        rank=world.rank,
        size=world.size,
        accumulation=1,
        device=torch.device("cpu"),
        threads=1,
    )
    entries = [
        (f"epoch {epoch} step {step}", int(index), *hashes)
        for epoch in (0, 1)
        for step, batch in enumerate(loader.batches(epoch, 0))
        for index, *hashes in zip(
            batch.indices,
            *map(
                digests,
                (
                    batch.images,
                    batch.labels.classes,
                    batch.labels.maps.scores,
                    batch.labels.maps.ids,
                    batch.labels.maps.boxes,
                ),
            ),
            strict=True,
        )
    ]
    loader.close()
    torch.save({"entries": entries}, out / f"rank_{world.rank}.pt")


def digests(samples: torch.Tensor | None) -> list[str]:
    assert samples is not None
    return [hashlib.sha256(sample.contiguous().numpy().tobytes()).hexdigest() for sample in samples]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
