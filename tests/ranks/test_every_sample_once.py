"""A step has the same samples on any number of ranks, and a killed and resumed epoch has each sample once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainLoader
from horovod_volo.pack import main as pack
from horovod_volo.token_labels.source import open_labels
from tests.runs import FAILED, start

EPOCHS, STEPS, GLOBAL_BATCH = 2, 4, 12
SAVED_AT, KILLED_AT, STOPPED_AT = 2, 3, 5


def test_a_killed_and_resumed_epoch_has_each_sample_once(demo_images, tmp_path, monkeypatch):
    """Of shards, the last of which has fewer images; also on another number of ranks.

    tests/faults/test_lost_ranks.py shows it for images in folders, on the same number of ranks.
    """
    folder, shards = tmp_path / "records", tmp_path / "shards"
    assert pack([str(demo_images(48, 10)), str(shards), "--shard-images", "20", "--workers", "1"]) == 0
    folder.mkdir()
    monkeypatch.setenv("CONSUMED", str(folder))
    flags = (
        "--resume",
        "auto",
        "--epochs",
        str(EPOCHS),
        "--checkpoint-every",
        str(SAVED_AT),
        "--log-every",
        "1",
    )
    flags += ("--block-shuffle", "5", "--shuffle-window", "3")

    def attempt(ranks: int, start_with: str, fault: str, **end: int) -> tuple[str, dict[int, Counter[int]]]:
        more = (*flags, "--batch-size", str(GLOBAL_BATCH // ranks))
        settings = {"ranks": ranks, "start_with": start_with, "fault": fault}
        return start(shards, tmp_path, *more, **settings, **end), read_records(folder, ranks)

    _, first = attempt(2, "gloo", f"1:{KILLED_AT}:SIGKILL", status=FAILED)
    shown, second = attempt(2, "mpi", "1:99:SIGKILL", stop_at=STOPPED_AT)
    assert f"at step {SAVED_AT}" in shown
    shown, third = attempt(3, "mpi", "1:99:SIGKILL")
    assert f"at step {STOPPED_AT}" in shown
    assert KILLED_AT in first
    assert first[SAVED_AT] == second[SAVED_AT]
    # The steps of an attempt after its last checkpoint are repeated by the next attempt.
    final = [first[step] for step in range(SAVED_AT)]
    final += [second[step] for step in range(SAVED_AT, STOPPED_AT)]
    final += [third[step] for step in range(STOPPED_AT, EPOCHS * STEPS)]
    for epoch in range(EPOCHS):
        counts = sum(final[epoch * STEPS : (epoch + 1) * STEPS], Counter())
        assert counts == dict.fromkeys(range(48), 1)


def read_records(folder: Path, ranks: int) -> dict[int, Counter[int]]:
    """Return the images of each step over all ranks of an attempt, and remove its files."""
    images: dict[int, Counter[int]] = {}
    files = sorted(folder.iterdir())
    assert len(files) == ranks
    for file in files:
        for line in file.read_text().splitlines():
            step, indices = json.loads(line)
            images.setdefault(step, Counter()).update(indices)
        file.unlink()
    return images


Sample = tuple[int, int, int, tuple[str, ...]]  # epoch, step, image, hashes


def samples_of(images: Path, *, batch_size: int, rank: int, size: int) -> list[Sample]:
    """Return the samples of a rank: hashes of pixels, labels and crop boxes."""
    catalog = build_catalog(str(images), "train", None)
    labels = open_labels(str(images / "token_labels"), catalog, None)
    place = {"rank": rank, "size": size, "accumulation": 1, "device": torch.device("cpu"), "threads": 1}
    settings = Data(batch_size=batch_size, vflip=0.3)
    with closing(TrainLoader(catalog, labels, settings, image_size=32, seed=5, **place)) as loader:
        found = []
        for epoch in (0, 1):
            for step, batch in enumerate(loader.batches(epoch, 0)):
                maps = batch.labels.maps
                parts = (batch.images, batch.labels.classes, maps.scores, maps.ids, maps.boxes)
                for index, *tensors in zip(batch.indices, *parts, strict=True):
                    found.append((epoch, step, int(index), tuple(map(digest, tensors))))
        return found


def digest(sample: torch.Tensor) -> str:
    return hashlib.sha256(sample.contiguous().numpy().tobytes()).hexdigest()


def test_one_two_and_three_ranks_have_the_same_samples(images):
    one, two, three = (
        Counter(
            sample
            for rank in range(size)
            for sample in samples_of(images, batch_size=6 // size, rank=rank, size=size)
        )
        for size in (1, 2, 3)
    )
    assert one == two == three
    assert len(one) == 2 * 6 * 6  # epochs, steps, images
    crops = [{index: hashes[0] for at, _, index, hashes in one if at == epoch} for epoch in (0, 1)]
    assert [len(of_epoch) for of_epoch in crops] == [36, 36]
    both = crops[0].keys() & crops[1].keys()
    assert all(crops[0][index] != crops[1][index] for index in both), "the second epoch repeats a crop"
