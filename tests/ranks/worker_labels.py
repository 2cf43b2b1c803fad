"""Writes this rank's part of a label store, in shards small enough that every rank has several."""

import sys
import time
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.labelling.generate import Order, label_images


def main(out: Path, data: str, weights: str, seconds_a_batch: float) -> None:
    world = World.connect()
    order = Order(
        data_dir=data,
        store=out / "store",
        teacher="volo_demo",
        weights=weights,
        pretrained=False,
        image_side=64,
        batch=2,
        top=3,
        shard_rows=6,
    )
    told: list[list[int]] = []

    def progress(done: int, total: int) -> None:
        told.append([done, total])
        time.sleep(seconds_a_batch)

    images, problems = label_images(order, world, progress)
    torch.save({"images": images, "problems": problems, "told": told}, out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
