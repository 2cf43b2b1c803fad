"""What writes to the disk, for tests of power cuts.

A writer goes on from what it finds in its folder, and logs what it has published.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.packing.pack import PackOptions, pack
from horovod_volo.elastic.ledger import LEDGER, Ledger, LedgerStart, _LedgerCheck
from horovod_volo.engine.checkpoint.files import (
    CHECKPOINTS,
    clean_up,
    delete_old_checkpoints,
    find_checkpoint,
    has_checkpoint,
    read_metadata,
    read_tensors,
    update_link,
    write_checkpoint,
)
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.labelling.store_writer import check_new_store, open_writer
from horovod_volo.monitor.logger import METRICS, AppendedFile, drop_records_after
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.train import main
from tests.faults.power_cut import MARKS, record_calls
from tests.runs import FINISHED, SMALL

START = LedgerStart(
    seed=7, images=50, block_shuffle=0, shuffle_window=64, global_batch=8, steps_per_epoch=6, ranks=1
)
STEPS = 14
SAVE_EVERY = 3  # steps
TRAINING = ("--epochs", "3", "--log-every", "1", "--keep-checkpoints", "1", "--eval-every", "1")
SCORES = {3: 0.1, 6: 0.3, 9: 0.2, 12: 0.2}


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"w": torch.arange(20.0) + step} for name in ("model", "optimizer")}


def resume(run: Path, start: LedgerStart, ledger: Ledger) -> int:
    """Open a run folder as engine/run.py does; return the step of the checkpoint to resume from."""
    clean_up(run / CHECKPOINTS)
    saved = find_checkpoint(str(run)) if has_checkpoint(run) else None
    step = int(read_metadata(saved)["step"]) if saved else 0
    drop_records_after(run / METRICS, step)
    ledger.begin(run / LEDGER, start, step, ["host"])
    return step


def train(root: Path, steps: int = STEPS, most: int = STEPS) -> int:
    """Train to `steps`, at most so many of them; return the step that was resumed from."""
    run, ledger = root / "runs" / "one", Ledger()
    lock = RunLock(run)
    first = resume(run, START, ledger)
    if first:
        read = read_tensors(find_checkpoint(str(run)))
        assert all(torch.equal(read[name]["w"], tensors(first)[name]["w"]) for name in read)
    sums = [_LedgerCheck()._sums_of(START, epoch).tolist() for epoch in range(3)]
    metrics, log = AppendedFile(run / METRICS), AppendedFile(run / MARKS)
    log.append(b"saved %d\n" % first)
    for step in range(first + 1, min(steps, first + most) + 1):
        metrics.append(f"{json.dumps({'step': step, 'lr': 0.1})}\n".encode())
        epoch, in_epoch = divmod(step - 1, START.steps_per_epoch)
        ledger.note(step, tuple(sums[epoch][in_epoch]))
        ledger.write()
        if step % SAVE_EVERY == 0:
            saved = write_checkpoint(run / CHECKPOINTS, step, tensors(step), {"lr": 0.1}, lock.check)
            log.append(b"saved %d\n" % step)
            delete_old_checkpoints(saved, 1)
            with atomic_write(saved / "evaluation.json") as file:
                file.write(json.dumps({"top1": SCORES[step]}).encode())
            if step < 9:  # the best score is that of step 6
                update_link(run / CHECKPOINTS / "best", saved)
                log.append(b"best %d\n" % step)
    lock.close()
    return first


def run(root: Path) -> None:
    """Train, find the last checkpoint damaged, and train the rest again."""
    train(root, 10)
    folder = root / "runs" / "one"
    AppendedFile(folder / MARKS).append(b"saved 6\n")  # what is left then
    with (folder / CHECKPOINTS / "last" / "model.safetensors").open("r+b") as file:
        file.write(b"damaged")
        file.flush()
        os.fsync(file.fileno())
    train(root)


def images(root: Path) -> Path:
    return (root.parent / "images").resolve()


def packed(root: Path) -> None:
    options = PackOptions(shard_images=6)
    pack(images(root), root / "out", options, workers=1, progress=lambda split: lambda done, total: None)
    AppendedFile(root / MARKS).append(b"published\n")


def labels(root: Path) -> None:
    catalog, shape = build_catalog(str(images(root)), "train", None), (2, 3, 3)
    random, folder = np.random.default_rng(0), root / "stores" / "one"
    check_new_store(folder)
    writer = open_writer(
        folder,
        catalog_keys(catalog),
        classes=len(catalog.classes),
        map_shape=shape,
        shard_rows=8,
        geometry="whole",
        teacher="a test",
        catalog=catalog.digest,
        generated=True,
    )
    for number in range(writer.shards):
        scores, ids = writer.empty_shard(number)
        scores[:], ids[:] = random.normal(size=scores.shape), random.integers(2, size=ids.shape)
        if writer.finished(number) is None:
            writer.write(number, scores, ids, [])
    writer.finish()
    AppendedFile(root / MARKS).append(b"published\n")


def listed(root: Path) -> None:
    for split in ("train", "val"):
        build_catalog(str(images(root)), split, root / "lists")
    AppendedFile(root / MARKS).append(b"published\n")


def careless(root: Path) -> None:
    """Write without any fsync."""
    partial = root / "partial"
    partial.write_bytes(b"content")
    partial.replace(root / "final")
    AppendedFile(root / MARKS).append(b"published\n")


def trained(root: Path) -> None:
    """Train as `python -m horovod_volo.train` does; this process has been bound to cores by then."""
    arguments = [str(images(root)), *SMALL, *TRAINING, "--output", str(root), "--name", "run"]
    assert main(arguments) == FINISHED


WRITERS = {each.__name__: each for each in (run, packed, labels, listed, careless, trained)}


def write_all(folder: str) -> None:
    """Let each of WRITERS write into a folder of its name, as a program with the recorder."""
    for name, write in WRITERS.items():
        root = Path(folder, name)
        record_calls(root)
        write(root)
