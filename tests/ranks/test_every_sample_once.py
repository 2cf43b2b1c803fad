"""A run that is killed and resumed, also on another number of ranks, has each sample of an epoch once.

The trainer is started by its command line, with images in class folders and in shards.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.pack import main as pack
from tests.ranks.launching import HERE, launcher, python, run

IMAGES, GLOBAL_BATCH, EPOCHS = 48, 12, 2
STEPS = IMAGES // GLOBAL_BATCH
SAVED_AT, KILLED_AT, STOPPED_AT = 2, 3, 5
SHARD_IMAGES = 20  # the last shard of a split has fewer
# Without these flags the complete list is shuffled.
SHUFFLES = {"tar": ("--block-shuffle", "5", "--shuffle-window", "3")}
NEVER = -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=IMAGES, val=10)
    return folder


@pytest.fixture(params=["folder", "tar"])
def form(request):
    return request.param


@pytest.fixture
def images(folder, form, tmp_path):
    written = tmp_path / form
    if form == "folder":
        return folder
    assert pack([str(folder), str(written), "--shard-images", str(SHARD_IMAGES), "--workers", "1"]) == 0
    return written


def test_a_killed_and_resumed_epoch_has_each_sample_once(images, form, tmp_path):
    def attempt(*more: str, ranks: int, start_with: str, killed_at: int = NEVER):
        batch = str(GLOBAL_BATCH // ranks)
        settings = ("--recipe", "demo", "--img-size", "32", "--epochs", str(EPOCHS), "--warmup-epochs", "0")
        often = ("--checkpoint-every", str(SAVED_AT), "--log-every", "1", "--batch-size", batch)
        where = ("--output", str(tmp_path / "runs"), "--name", "run", "--resume", "auto")
        script = (*python(), str(HERE / "worker_consumed.py"), str(records), str(killed_at), str(images))
        command = (*launcher(start_with, ranks), *script, *settings, *often, *where, *SHUFFLES.get(form, ()))
        return run([*command, *more], seconds=200)

    records = tmp_path / "records"
    records.mkdir()
    killed = attempt(ranks=2, start_with="gloo", killed_at=KILLED_AT)
    assert killed.returncode not in (0, 75), killed.stdout
    stopped = attempt("--stop-at-step", str(STOPPED_AT), ranks=2, start_with="mpi")
    assert stopped.returncode == 75, stopped.stdout
    assert f"at step {SAVED_AT}" in stopped.stdout
    ended = attempt(ranks=3, start_with="mpi")
    assert ended.returncode == 0, ended.stdout
    assert f"at step {STOPPED_AT}" in ended.stdout

    attempts = [read_records(records, ranks) for ranks in ([0, 1], [0, 1], [0, 1, 2])]
    # The steps of an attempt after its last checkpoint are repeated by the next attempt.
    final = {step: attempts[0][step] for step in range(SAVED_AT)}
    final |= {step: attempts[1][step] for step in range(SAVED_AT, STOPPED_AT)}
    final |= {step: attempts[2][step] for step in range(STOPPED_AT, EPOCHS * STEPS)}
    assert KILLED_AT in attempts[0]
    assert attempts[0][SAVED_AT] == attempts[1][SAVED_AT]
    for epoch in range(EPOCHS):
        counts = sum((final[step] for step in range(epoch * STEPS, (epoch + 1) * STEPS)), Counter())
        assert counts == dict.fromkeys(range(IMAGES), 1)


def read_records(folder: Path, ranks: list[int]) -> dict[int, Counter]:
    """Return the images of each step over all ranks of one attempt, the earliest that is not read yet."""
    images: dict[int, Counter] = {}
    for rank in ranks:
        file = min(folder.glob(f"*_{rank}.jsonl"))
        for line in file.read_text().splitlines():
            step, indices = json.loads(line)
            images.setdefault(step, Counter()).update(indices)
        file.unlink()
    return images
