"""Records the images of each step: `--plugin tests.ranks.consumed`, CONSUMED=FOLDER."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.loader import TrainLoader

_batches = TrainLoader.batches
_file = Path(os.environ["CONSUMED"], f"{time.time_ns()}_{read_launch_env().rank}.jsonl")


def _recorded(loader: TrainLoader, epoch: int, first_step: int) -> Iterator[TrainBatch]:
    for step, batch in enumerate(_batches(loader, epoch, first_step), epoch * loader.steps + first_step):
        with _file.open("a") as file:
            print(json.dumps([step, batch.indices.tolist()]), file=file)
        yield batch


TrainLoader.batches = _recorded  # type: ignore[method-assign]
