"""Generates labels on this rank, with shards so small that every rank writes several."""

import sys
import time
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.labelling.generate import GenerateRequest, generate_labels


def main(out: Path, data: str, weights: str, seconds_per_batch: float) -> None:
    world = World.connect()
    request = GenerateRequest(
        data_dir=data,
        store=out / "store",
        teacher="volo_demo",
        weights=weights,
        pretrained=False,
        image_size=64,
        batch_size=2,
        top_k=3,
        shard_rows=6,
    )
    calls: list[list[int]] = []

    def progress(done: int, total: int) -> None:
        calls.append([done, total])
        time.sleep(seconds_per_batch)

    images, problems = generate_labels(request, world, progress)
    torch.save({"images": images, "problems": problems, "progress": calls}, out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
