"""After a power cut a run resumes exactly, a command completes its files, and nothing published is lost.

Writers write once, in a program whose calls are recorded. Each state that a power cut may leave of that is
rebuilt, and read as the package does. A writer goes on from what it finds, and logs what it has published.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_volo.core.atomic_file import flush
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.packing import packed_split
from horovod_volo.data.packing.manifest import check_split
from horovod_volo.data.packing.pack import PackOptions, pack
from horovod_volo.elastic.ledger import LEDGER, Ledger, LedgerStart, check_ledger, read_ledger
from horovod_volo.engine.checkpoint import files
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.labelling.store_writer import check_new_store, open_writer
from horovod_volo.labelling.verify import check_store
from horovod_volo.monitor.logger import METRICS, AppendedFile, drop_records_after, read_metrics
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.store import is_store
from horovod_volo.train import main
from tests.faults.power_cut import MARKS, Disk, build_tree, read_tree, shim
from tests.ranks.launching import run
from tests.runs import FINISHED, SMALL, STOPPED, assert_same_state, records, start
from tests.unit.shard_writers import in_this_process

TRAINING = ("--epochs", "3", "--log-every", "1", "--eval-every", "1", "--keep-checkpoints", "2")
TRAINING += ("--resume", "auto")
STEPS_PER_EPOCH = 5


def images(root: Path) -> str:
    return str((root.parent / "images").resolve())


def publish(root: Path, what: str = "published") -> None:
    AppendedFile(root / MARKS).append(f"{what}\n".encode())


def packed(root: Path) -> None:
    options = PackOptions(shard_images=6)
    pack(Path(images(root)), root / "out", options, workers=1, progress=lambda split: lambda *_: None)
    publish(root)


def labels(root: Path) -> None:
    catalog, random = build_catalog(images(root), "train", None), np.random.default_rng(0)
    about: Any = {"classes": 10, "map_shape": (2, 3, 3), "catalog": catalog.digest, "generated": True}
    about |= {"shard_rows": 8, "geometry": "whole", "teacher": "a test"}
    check_new_store(root / "stores" / "one")
    writer = open_writer(root / "stores" / "one", catalog_keys(catalog), **about)
    for number in range(writer.shards):
        scores, ids = writer.empty_shard(number)
        scores[:], ids[:] = random.normal(size=scores.shape), random.integers(10, size=ids.shape)
        if writer.finished(number) is None:
            writer.write(number, scores, ids, [])
    writer.finish()
    publish(root)


def listed(root: Path) -> None:
    for split in ("train", "val"):
        build_catalog(images(root), split, root / "lists")
    publish(root)


def careless(root: Path) -> None:
    """Write without any fsync."""
    (root / "partial").write_bytes(b"content")
    (root / "partial").replace(root / "final")
    publish(root)


def trained(root: Path) -> None:
    """Train two epochs, find the second checkpoint damaged, and train from the first one to the end."""
    flags = [images(root), *SMALL, *TRAINING, "--output", f"{root}/runs", "--name", "run"]
    assert main([*flags, "--stop-at-step", str(2 * STEPS_PER_EPOCH)]) == STOPPED
    publish(root / "runs" / "run", "after epoch 1: what is left then")
    weights = (root / "runs" / "run" / files.CHECKPOINTS / "last").resolve() / "model.safetensors"
    weights.write_bytes(b"damaged")
    flush(weights)
    assert main(flags) == FINISHED


WRITERS = {each.__name__: each for each in (packed, labels, listed, careless, trained)}


def write_all(folder: str) -> None:
    """Let each of WRITERS write into a folder of its name."""
    for name, write in WRITERS.items():
        root = Path(folder, name)
        root.mkdir()
        os.environ["DISK_ROOT"] = str(root)
        write(root)


@pytest.fixture(scope="module")
def written(demo_images: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    (folder / "images").symlink_to(demo_images(20, 10))
    # Not with -m: the workers of a pack would import this program, and PyTorch with it.
    program = f"from tests.faults.test_power_cuts import write_all; write_all({str(folder)!r})"
    done = run([sys.executable, "-c", program], seconds=600, LD_PRELOAD=str(shim(folder)))
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def judge_all(written: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., None]:
    def judge_all(name: str, judge: Callable[[Path, str, Path], str], most: int) -> None:
        """Judge the states after all cuts, or a sample of `most`; print how many had which outcome."""
        soak, root, outcomes = request.config.getoption("--soak"), tmp_path / "state", Counter[str]()
        (tmp_path / "images").symlink_to(written / "images")
        disk = Disk(written / name, choices=256 if soak else 16)
        states = list(disk.states().items())
        sample = states if soak or len(states) <= most else random.Random(0).sample(states, most)
        for state, published in sample:
            build_tree(state, root)  # one that is refused is left there
            outcomes[judge(root, published, written / name)] += 1
            shutil.rmtree(root)
        counts = f"{disk.enumerated} states, {len(states)} different, {len(sample)} judged"
        print(f"{name}: {counts}: {dict(outcomes)}")

    return judge_all


def judge_files(root: Path, published: str, finished: Path) -> str:
    write, expected, store = WRITERS[finished.name], read_tree(finished), root / "stores" / "one"
    lost = expected - read_tree(root)
    assert not (published and lost), f"published, and lost: {sorted(name for name, _ in lost)}"
    for split in (root / "out" / "train", root / "out" / "val"):
        assert not split.exists() or not check_split(split, workers=1, progress=lambda *_: None)
    if is_store(store):
        assert not lost
        assert not check_store(store, build_catalog(images(root), "train", None), lambda *_: None).damage
        with pytest.raises(UserError, match="is already a complete label store"):
            write(root)
        return "complete"
    write(root)
    assert expected <= read_tree(root)
    return "completed again" if lost else "complete"


@pytest.mark.parametrize("name", ["packed", "labels", "listed"])
def test_files_are_complete_or_completed(judge_all, monkeypatch, name):
    monkeypatch.setattr(packed_split, "run_in_processes", in_this_process)
    judge_all(name, judge_files, most=40)


def test_a_writer_without_fsync_is_found(judge_all):
    with pytest.raises(AssertionError, match="published, and lost"):
        judge_all("careless", judge_files, most=1000)


def judge_run(root: Path, published: str, finished: Path) -> str:
    run, scores = root / "runs" / "run", [each["top1"] for each in records(finished / "runs", "top1")]
    epochs = int((["0", *re.findall(r"after epoch (\d+)", published)])[-1])
    announced = epochs * STEPS_PER_EPOCH
    step = open_run(run, finished / "runs" / "run")
    assert step >= announced
    last, best = (run / files.CHECKPOINTS / name for name in ("last", "best"))
    if announced:
        assert last.is_dir()
        assert last.resolve() >= files.checkpoint_path(last.parent, announced).resolve()
    if epochs == 3:  # the score of an epoch is logged before `best` is updated
        assert files.find_damage(best) is None
        assert json.loads((best / "evaluation.json").read_bytes())["top1"] >= max(scores[:2])
    logged = [each["step"] for each in read_metrics(run / METRICS) if "lr" in each]
    assert logged == list(range(1, step + 1))
    assert f". {step} steps in" in check_ledger(run)
    return "a new run" if not step else "as announced" if step == announced else "from a later step"


def open_run(run: Path, finished: Path) -> int:
    """Open a run folder as engine/run.py does; return the step to resume from."""
    lock = RunLock(run)
    files.clean_up(run / files.CHECKPOINTS)
    saved = files.find_checkpoint(str(run)) if files.has_checkpoint(run) else None
    step = int(files.read_metadata(saved)["step"]) if saved else 0
    drop_records_after(run / METRICS, step)
    (first, *_), ledger = read_ledger(finished / LEDGER), Ledger()
    about = {name: first[name] for name in first if name not in ("step", "hosts")}
    ledger.begin(run / LEDGER, LedgerStart(**about), step, first["hosts"])
    lock.close()
    return step


def test_a_run_resumes(judge_all):
    judge_all("trained", judge_run, most=100)


@pytest.mark.soak
def test_the_weights_after_a_power_cut_are_the_same(written, tmp_path):
    states, chance = list(Disk(written / "trained").states()), random.Random(0)
    for number, state in enumerate(chance.sample(states, int(os.environ.get("POWER_CUTS", "12")))):
        output = tmp_path / str(number)
        build_tree(state, output)
        start(Path(images(written / "trained")), output / "runs", *TRAINING, ranks=1)
        assert_same_state(written / "trained" / "runs", output / "runs")
        assert "3 epochs are complete" in check_ledger(output / "runs" / "run")
