"""Train through the Python interface on this rank: callbacks, one of which fails, and a data set."""

import hashlib
import sys
from pathlib import Path

import torch

from horovod_volo import Callback, TrainContext, Trainer, UserError
from horovod_volo.cluster.entry import connect_once
from horovod_volo.data.remote.remote_catalog import CacheSettings
from horovod_volo.tasks.shared_catalog import shared_catalog

SETTINGS = {"recipe": "demo", "token_label": False, "img_size": 32, "batch_size": 4, "epochs": 2}
SETTINGS |= {"warmup_epochs": 0, "log_every": 5, "eval_every": 1, "binding": "none"}


class NotedPoints(Callback):
    """Notes the points at which it was called, with the step of each."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int]] = []

    def started(self, run: TrainContext) -> None:
        self.points.append(("started", run.step))

    def step_done(self, run: TrainContext) -> None:
        self.points.append(("step_done", run.step))

    def logged(self, run: TrainContext, values) -> None:
        self.points.append(("logged", run.step))

    def evaluated(self, run: TrainContext, metrics) -> None:
        self.points.append(("evaluated", run.step))

    def ended(self, run: TrainContext, *, finished: bool) -> None:
        self.points.append((f"ended {finished}", run.step))


class FailsOnRank(Callback):
    """Fails after a step, on one rank alone."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def step_done(self, run: TrainContext) -> None:
        if (run.world.rank, run.step) == (self.rank, self.step):
            raise KeyError("no such layer")


class EncodedImages:
    """The encoded images of a folder, and the names of their classes."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[bytes, str]:
        return self.files[index].read_bytes(), self.files[index].parent.name


def main() -> None:
    out, images, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    noted = NotedPoints()
    by_folder = Trainer(images, name="folder", output=out, callbacks=[noted], **SETTINGS)
    first = by_folder.fit()
    given = Trainer(
        train=EncodedImages(images / "train"),
        val=EncodedImages(images / "val"),
        name="given",
        output=out,
        **SETTINGS,
    )
    second = given.fit()
    failing = Trainer(images, name="failing", output=out, callbacks=[FailsOnRank(1, 2)], **SETTINGS)
    world = connect_once(given.config)
    cache = CacheSettings(str(out / "cache"), 1.0)
    catalog = shared_catalog(address, "train", out / "catalogs", world, cache=cache)
    own = range(world.rank, len(catalog), world.size)
    shards = [(index, hashlib.sha256(catalog.read(index)).hexdigest()) for index in own]
    catalog.close()
    message, cause = "", ""
    try:
        failing.fit()
    except UserError as error:
        message, cause = str(error), type(error.__cause__).__name__
    torch.save(
        {
            "points": noted.points,
            "finished": first.finished,
            "first": first.last,
            "second": second.last,
            "evaluated": given.evaluate(),
            "digest": catalog.digest,
            "shards": shards,
            "message": message,
            "cause": cause,
            "saved": sorted(path.name for path in (failing.folder / "checkpoints").glob("step_*")),
        },
        out / f"rank_{world.rank}.pt",
    )


if __name__ == "__main__":
    main()
