"""Runs the trainer, records the images of each step, and kills the last rank at a given step."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.loader import TrainLoader
from horovod_volo.train import main

batches = TrainLoader.batches


def record_batches(folder: Path, killed_at: int) -> None:
    """Record each batch in a file of this rank; kill the last rank at the batch of step `killed_at`."""
    launch = read_launch_env()
    file = (folder / f"{time.time_ns()}_{launch.rank}.jsonl").open("w")

    def recorded(loader: TrainLoader, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        first = epoch * loader.steps + first_step
        for step, batch in enumerate(batches(loader, epoch, first_step), first):
            print(json.dumps([step, batch.indices.tolist()]), file=file, flush=True)
            if step == killed_at and launch.rank == launch.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    TrainLoader.batches = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    record_batches(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
