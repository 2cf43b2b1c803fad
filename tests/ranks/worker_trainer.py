"""Train through the Python interface on this rank: callbacks, one of which fails, and a data set."""

import contextlib
import hashlib
import io
import sys
from pathlib import Path

import torch

from horovod_volo.cluster.entry import connect_once
from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.engine.context import TrainContext
from horovod_volo.remote.remote_catalog import CacheSettings
from horovod_volo.trainer import Trainer

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
    """Fails at one point of a step, on one rank alone."""

    def __init__(self, rank: int, step: int, point: str) -> None:
        self.rank, self.step, self.point = rank, step, point

    def _fail(self, run: TrainContext, point: str) -> None:
        if (run.world.rank, run.step, point) == (self.rank, self.step, self.point):
            raise KeyError("no such layer")

    def started(self, run: TrainContext) -> None:
        self._fail(run, "started")

    def step_done(self, run: TrainContext) -> None:
        self._fail(run, "step_done")

    def logged(self, run: TrainContext, values) -> None:
        self._fail(run, "logged")

    def evaluated(self, run: TrainContext, metrics) -> None:
        self._fail(run, "evaluated")

    def ended(self, run: TrainContext, *, finished: bool) -> None:
        self._fail(run, "ended")


class ExchangesAlways(Callback):
    """Calls a collective at every point."""

    def started(self, run: TrainContext) -> None:
        assert run.world.allgather_object(run.step) == [run.step] * 2

    def step_done(self, run: TrainContext) -> None:
        self.started(run)

    def logged(self, run: TrainContext, values) -> None:
        self.started(run)

    def evaluated(self, run: TrainContext, metrics) -> None:
        self.started(run)

    def ended(self, run: TrainContext, *, finished: bool) -> None:
        self.started(run)


def failures(out: Path, images: Path) -> dict[str, tuple[str, str, str, list[str]]]:
    """Return the error, its cause, what was printed and what was saved, of a failure at each point."""
    found = {}
    for point, step in (("started", 0), ("step_done", 2), ("logged", 5), ("evaluated", 5), ("ended", 10)):
        fails = [FailsOnRank(1, step, point), ExchangesAlways()]
        trainer = Trainer(images, name=point, output=out, callbacks=fails, hang_timeout=20, **SETTINGS)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                trainer.fit()
        except UserError as error:
            saved = sorted(path.name for path in (trainer.folder / "checkpoints").glob("step_*"))
            cause = type(error.__cause__).__name__
            found[point] = (str(error), cause, said.getvalue(), saved)
    return found


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
    world = connect_once(given.config)
    cache = CacheSettings(str(out / "cache"), 1.0)
    catalog = shared_catalog(address, "train", out / "catalogs", world, cache=cache)
    own = range(world.rank, len(catalog), world.size)
    shards = [(index, hashlib.sha256(catalog.read(index)).hexdigest()) for index in own]
    catalog.close()
    torch.save(
        {
            "points": noted.points,
            "finished": first.finished,
            "first": first.last,
            "second": second.last,
            "evaluated": given.evaluate(),
            "digest": catalog.digest,
            "shards": shards,
            "failures": failures(out, images),
        },
        out / f"rank_{world.rank}.pt",
    )


if __name__ == "__main__":
    main()
