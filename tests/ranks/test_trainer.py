"""The Python interface on two ranks: the same lines, callbacks on all ranks, one message for an error."""

import contextlib
import hashlib
import io
from functools import partial
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.engine.context import TrainContext
from horovod_volo.pack import main as pack
from horovod_volo.trainer import Trainer
from tests.range_server import serving
from tests.ranks.launching import on_ranks

SETTINGS = {"recipe": "demo", "token_label": False, "img_size": 32, "batch_size": 4, "epochs": 2}
SETTINGS |= {"warmup_epochs": 0, "log_every": 5, "eval_every": 1, "binding": "none"}
# Where a callback fails, in which step, and which steps have been saved then: ranks agree on the stop in the
# next step, or in the evaluation that comes before it.
FAILURES = {
    "started": (0, []),
    "step_done": (2, [3]),
    "logged": (5, [5]),
    "evaluated": (5, [5]),
    "ended": (10, [5, 10]),
}


class EveryPoint(Callback):
    """A callback with one method, `at`, for all points."""


for _point in FAILURES:
    setattr(EveryPoint, _point, lambda self, run, *_, point=_point, **facts: self.at(run, point, **facts))


class NotedPoints(EveryPoint):
    """Notes the points at which it was called, with the step of each."""

    def __init__(self) -> None:
        self.points: list[tuple[Any, ...]] = []

    def at(self, run: TrainContext, point: str, **facts: bool) -> None:
        self.points.append((point, run.step, *facts.values()))


class FailsOnRank(EveryPoint):
    """Fails at one point of a step, on rank 1 alone."""

    def __init__(self, step: int, point: str) -> None:
        self.step, self.point = step, point

    def at(self, run: TrainContext, point: str, **facts: bool) -> None:
        if (run.world.rank, run.step, point) == (1, self.step, self.point):
            raise KeyError("no such layer")


class ExchangesAlways(EveryPoint):
    """Calls a collective at every point."""

    def at(self, run: TrainContext, point: str, **facts: bool) -> None:
        assert run.world.allgather_object(run.step) == [run.step] * 2


def trained(world: World, *, images: Path, out: Path) -> dict[str, Any]:
    """Train and evaluate; return what happened."""
    noted = NotedPoints()
    trainer = Trainer(images, name="folder", output=out, callbacks=[noted], **SETTINGS)
    result = trainer.fit()
    return {
        "points": noted.points,
        "finished": result.finished,
        "last": result.last,
        "evaluated": trainer.evaluate(weights="last"),
    }


def failed(world: World, *, images: Path, out: Path) -> dict[str, tuple[str, str, str, list[str]]]:
    """Return the error, its cause, what was printed and what was saved, of a failure at each point."""
    found = {}
    for point, (step, _) in FAILURES.items():
        fails = [FailsOnRank(step, point), ExchangesAlways()]
        trainer = Trainer(images, name=point, output=out, callbacks=fails, hang_timeout=20, **SETTINGS)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                trainer.fit()
        except UserError as error:
            saved = sorted(path.name for path in (trainer.folder / "checkpoints").glob("step_*"))
            found[point] = (str(error), type(error.__cause__).__name__, said.getvalue(), saved)
    return found


def read_shards(world: World, *, address: str, out: Path) -> tuple[str, list[tuple[int, str]]]:
    """Read this rank's part of the images of a server; return the digest of their list, and their hashes."""
    cache = Data(cache_dir=str(out / "cache"), cache_gib=1.0)
    with contextlib.closing(
        shared_catalog(address, "train", out / "catalogs", world, cache=cache)
    ) as catalog:
        own = range(world.rank, len(catalog), world.size)
        return catalog.digest, [(index, hashlib.sha256(catalog.read(index)).hexdigest()) for index in own]


def test_two_ranks_train_with_callbacks(demo_images, tmp_path):
    images, out = demo_images(40, 21), tmp_path / "out"  # 21 images of 2 ranks: one more on a rank
    assert pack([str(images), str(tmp_path / "shards"), "--shard-images", "16"]) == 0
    with serving(tmp_path / "shards") as server:
        calls = (partial(call, images=images, out=out) for call in (trained, failed))
        trainings, failures, shards = on_ranks(
            out, *calls, partial(read_shards, address=server.address, out=out)
        )
        shard_bytes = sum(file.stat().st_size for file in (tmp_path / "shards" / "train").glob("*.tar"))
        assert server.bytes_of(".tar") <= shard_bytes + 2 * 3  # ranks share blocks; a byte for each version
        assert [path for path, *_ in server.requests].count("/train/images.catalog") == 1
    check_trainings(trainings)
    check_failures(failures, out)
    local = build_catalog(str(tmp_path / "shards"), "train", None)
    assert [digest for digest, _ in shards] == [local.digest] * 2
    expected = [hashlib.sha256(local.read(index)).hexdigest() for index in range(len(local))]
    assert [text for _, text in sorted(pair for _, pairs in shards for pair in pairs)] == expected


def check_trainings(trainings: list[Any]) -> None:
    # 40 images, 4 on each of 2 ranks: 5 steps an epoch.
    steps = [("step_done", step) for step in range(1, 11)]
    points = [("started", 0), *steps[:5], ("logged", 5), ("evaluated", 5)]
    points += [*steps[5:], ("logged", 10), ("evaluated", 10), ("ended", 10, True)]
    for rank in trainings:
        assert rank["points"] == points
        assert rank["finished"]
        assert rank["evaluated"]["top1"] == rank["last"]["top1"]
        assert rank["evaluated"]["images"] == rank["last"]["images"] == 21


def check_failures(failures: list[Any], out: Path) -> None:
    for point, (_, saved) in FAILURES.items():
        for rank, found in enumerate(failures):
            message, cause, printed, steps = found[point]
            assert message.startswith(
                f"The callback FailsOnRank failed in {point}: KeyError: 'no such layer' ("
            )
            assert message.endswith("Correct it, or leave it out. (seen on rank 1 of 2)")
            assert steps == [f"step_{step:08}" for step in saved]
            assert cause == ("KeyError" if rank else "NoneType")
            assert bool(printed) == bool(rank)
        assert printed.startswith(f"error on rank 1: The callback FailsOnRank failed in {point}: KeyError")
        assert printed.count("Traceback (most recent call last)") == printed.count("in at") == 1
        assert "KeyError" in (out / point / "log.txt").read_text()
