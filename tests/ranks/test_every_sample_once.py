"""A killed and resumed epoch has each sample once, also on another number of ranks.

That a step has the same samples on any number of ranks is shown in tests/unit/test_data_loader.py,
test_data_sampler.py and test_data_augment.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from horovod_volo.pack import main as pack
from tests.runs import FAILED, start

EPOCHS, STEPS, GLOBAL_BATCH = 2, 4, 12
SAVED_AT, KILLED_AT, STOPPED_AT = 2, 3, 5


def test_a_killed_and_resumed_epoch_has_each_sample_once(demo_images, tmp_path, monkeypatch):
    """Of shards, the last of which has fewer images.

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
