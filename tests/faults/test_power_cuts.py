"""After a power cut a run resumes exactly, a command completes its files, and nothing published is lost.

Each test rebuilds all different states that a cut may leave on the disk, and reads each as the package does.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.packing import packed_split
from horovod_volo.data.packing.manifest import check_split
from horovod_volo.elastic.ledger import LEDGER, Ledger, LedgerStart, check_ledger, read_ledger
from horovod_volo.engine.checkpoint.files import CHECKPOINTS, find_damage
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.labelling.verify import check_store
from horovod_volo.monitor.logger import METRICS, read_metrics
from horovod_volo.token_labels.store import is_store
from tests.faults import power_writers
from tests.faults.power_cut import Disk, Tree, build_tree, read_tree, shim
from tests.faults.power_writers import TRAINING
from tests.ranks.launching import environment
from tests.runs import assert_same_state, records, start

Judge = Callable[[Path, str], str]  # reads a state, given what had been published; returns the outcome


@pytest.fixture(scope="module")
def written(demo_images: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let all writers write once; return the folder of their folders."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "images").symlink_to(demo_images(20, 10))
    # Not with -m: the workers of a pack would import this program, and PyTorch with it.
    program = f"from tests.faults.power_writers import write_all; write_all({str(folder)!r})"
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment(LD_PRELOAD=str(shim(folder))), check=True, timeout=60)
    return folder


def judge_all(disk: Disk, judge: Judge, folder: Path, most: int, name: str) -> None:
    """Judge the states, or a sample of so many, and print how many had which outcome."""
    began = time.monotonic()
    states, outcomes = list(disk.states().items()), Counter[str]()
    sample = states if len(states) <= most else random.Random(0).sample(states, most)
    listed = time.monotonic() - began
    for number, (tree, published) in enumerate(sample):
        build_tree(tree, folder)
        try:
            outcomes[judge(folder, published)] += 1
        except BaseException:
            print(f"{name}: state {number}, published: {published.splitlines()[-3:]}")
            print("\n".join(sorted(f"{path} {str(content)[:60]}" for path, content in tree)))
            raise
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    print(
        f"{name}: {disk.enumerated} states, {len(states)} different, {len(sample)} judged: {dict(outcomes)}"
        f" ({listed:.1f} of {seconds:.1f} s to list them)"
    )


def last_number(word: str, published: str) -> int:
    return int((["0", *re.findall(rf"{word} (\d+)", published)])[-1])


def resumed(first: int, announced: int) -> str:
    if not first:
        return "a new run"
    return "the announced checkpoint" if first == announced else "a later checkpoint"


def judge_run(root: Path, published: str) -> str:
    run, announced = root / "runs" / "one", last_number("saved", published)
    for link in ("last", "best"):
        if step := last_number("saved" if link == "last" else link, published):
            pointed = (run / CHECKPOINTS / link).resolve()
            assert pointed.is_dir(), f"{link} dangles"
            assert int(pointed.name.removeprefix("step_")) >= step, f"{link} is an earlier one"
            assert link == "last" or find_damage(pointed) is None
    first = power_writers.train(root, most=1)
    assert first >= announced
    taken = list(range(1, first + 2))
    assert [record["step"] for record in read_metrics(run / METRICS)] == taken
    assert f". {first + 1} steps in" in check_ledger(run)
    return resumed(first, announced)


def judge_files(root: Path, published: str, write: Callable[[Path], None], expected: Tree) -> str:
    lost = expected - read_tree(root)
    assert not (published and lost), f"published, and lost: {sorted(name for name, _ in lost)}"
    for split in (root / "out" / "train", root / "out" / "val"):
        assert not split.exists() or not check_split(split, workers=1, progress=lambda *_: None)
    store = root / "stores" / "one"
    if is_store(store):
        images = build_catalog(str(power_writers.images(root)), "train", None)
        assert not lost
        assert not check_store(store, images, lambda *_: None).damage
        with pytest.raises(UserError, match="is already a complete label store"):
            write(root)
        return "complete"
    write(root)
    assert expected <= read_tree(root)
    return "completed again" if lost else "complete"


def in_this_process(
    function: Callable[..., Any], tasks: Mapping[Any, Any], workers: int, note: Callable[..., None]
) -> None:
    """Pack shards without worker processes, which take a second to start."""
    del workers
    for key, arguments in tasks.items():
        note(key, function(*arguments))


@pytest.mark.parametrize("name", ["run", "packed", "labels", "listed"])
def test_every_state_after_a_power_cut_is_recovered(written, tmp_path, monkeypatch, name, request):
    soak = request.config.getoption("--soak")
    monkeypatch.setattr(packed_split, "run_in_processes", in_this_process)
    root, expected = written / name, read_tree(written / name)
    judge = (
        judge_run
        if name == "run"
        else partial(judge_files, write=power_writers.WRITERS[name], expected=expected)
    )
    (tmp_path / "images").symlink_to(written / "images")
    disk = Disk(root, wide=soak)
    most = {"run": 200, "packed": 50}.get(name, 100)
    judge_all(disk, judge, tmp_path / "state", 10**9 if soak else most, name)


def test_a_writer_without_fsync_is_found(written, tmp_path):
    root = written / "careless"
    judge = partial(judge_files, write=power_writers.careless, expected=read_tree(root))
    with pytest.raises(AssertionError, match="published, and lost"):
        judge_all(Disk(root), judge, tmp_path / "state", 10**9, "careless")


def judge_training(root: Path, published: str, finished: Path) -> str:
    run = root / "run"
    (head, *_), whole = read_ledger(finished / "run" / LEDGER), records(finished)
    ledger_start = LedgerStart(**{name: head[name] for name in head if name not in ("step", "hosts")})
    epochs = last_number("after epoch", published)
    announced = epochs * ledger_start.steps_per_epoch
    scores = [record["top1"] for record in whole if "top1" in record][: max(0, epochs - 1)]
    best = run / CHECKPOINTS / "best"
    if scores:  # the score of an epoch is logged before `best` is updated
        assert find_damage(best) is None
        assert json.loads((best / "evaluation.json").read_text())["top1"] >= max(scores)
    lock = RunLock(run)
    first = power_writers.resume(run, ledger_start, Ledger())
    lock.close()
    assert first >= announced
    logged = [record for record in whole if "lr" in record and record["step"] <= first]
    assert [record for record in read_metrics(run / METRICS) if "lr" in record] == logged
    assert f". {first} steps in" in check_ledger(run)
    return resumed(first, announced)


def test_every_state_of_a_training_run_is_resumed(written, tmp_path, request):
    judge = partial(judge_training, finished=written / "trained")
    most = 10**9 if request.config.getoption("--soak") else 60
    judge_all(Disk(written / "trained"), judge, tmp_path / "state", most, "trained")


@pytest.mark.soak
def test_training_ends_equally_after_a_power_cut(written, tmp_path):
    states, chance = list(Disk(written / "trained").states()), random.Random(0)
    for number, tree in enumerate(chance.sample(states, int(os.environ.get("POWER_CUTS", "12")))):
        output = tmp_path / str(number)
        build_tree(tree, output)
        start(power_writers.images(written / "trained"), output, *TRAINING, "--resume", "auto", ranks=1)
        assert_same_state(written / "trained", output)
        assert "3 epochs are complete" in check_ledger(output / "run")
