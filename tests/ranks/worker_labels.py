"""Generates labels on this rank, with shards so small that every rank writes several."""

import sys
import time
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.labelling.generate import generate_labels
from horovod_volo.labelling.teacher import TeacherChoice


def main(out: Path, data: str, weights: str, seconds_per_batch: float) -> None:
    world = World.connect()
    teacher = TeacherChoice("volo_demo", weights, image_side=64, batch_size=2)
    calls: list[list[int]] = []

    def progress(done: int, total: int) -> None:
        calls.append([done, total])
        time.sleep(seconds_per_batch)

    images, problems = generate_labels(data, out / "store", teacher, 3, world, progress, shard_rows=6)
    torch.save({"images": images, "problems": problems, "progress": calls}, out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
