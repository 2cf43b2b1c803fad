"""The trainer itself, told from outside: it notes which images each step is given, and may be killed."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.data.loader import TrainBatch, TrainLoader
from horovod_volo.train import main

passes = TrainLoader.passes


def noting(notes: Path, killed_at: int) -> None:
    """Add a line for each batch to this rank's notes; the last rank is killed when it gets a step's batch."""
    place = read_launch_env()
    file = (notes / f"{time.time_ns()}_{place.rank}.jsonl").open("w")

    def noted(stream: TrainLoader, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        for step, batch in enumerate(passes(stream, epoch, first_step), epoch * stream.steps + first_step):
            print(json.dumps([step, batch.indices.tolist()]), file=file, flush=True)
            if step == killed_at and place.rank == place.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    TrainLoader.passes = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    noting(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
