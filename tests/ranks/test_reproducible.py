"""With --reproducible, the weights do not depend on the number of ranks, nor on those that are lost."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.config.derived import resolve
from horovod_volo.config.recipe import assemble
from horovod_volo.config.validation import check
from horovod_volo.core.errors import UserError
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.elastic.ledger import check_ledger
from tests import runs
from tests.faults import elastic_run
from tests.runs import SMALL, assert_same_state, records, state

# Of 40 images, 3 steps of 12: 4 micro-batches for 1, 2, 3 or 4 ranks.
REPRODUCIBLE = ("--reproducible", "--global-batch", "12", "--micro-batch", "3")
SETTINGS = ("--epochs", "2", "--mix-token", "--drop-path", "0.2", "--ema-decay", "0.9", "--log-every", "1")
start = partial(runs.start, small=(*SMALL, *SETTINGS, *REPRODUCIBLE))


@pytest.fixture(scope="module")
def on_one_rank(images, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("one")
    start(images, output, ranks=1)
    return output


@pytest.mark.parametrize(
    ("ranks", "start_with", "flags"),
    [
        (2, "gloo", ("--compression", "fp16")),
        (3, "mpi", ()),
        (4, "gloo", ()),
        (2, "mpi", ("--shard-optimizer",)),
        (3, "gloo", ("--shard-optimizer",)),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(images, on_one_rank, tmp_path, ranks, start_with, flags):
    start(images, tmp_path, *flags, ranks=ranks, start_with=start_with)
    assert_same_state(on_one_rank, tmp_path)
    for one, several in zip(records(on_one_rank, "lr"), records(tmp_path, "lr"), strict=True):
        for name in ("loss", "class_loss", "token_loss", "gradient_norm"):
            assert one[name] == several[name]
    assert "each of 36 images was taken once" in check_ledger(tmp_path / "run")


def test_muon_whose_matrices_are_shared(images, tmp_path):
    for ranks in (1, 3):
        start(images, tmp_path / str(ranks), "--opt", "muon", ranks=ranks)
    assert_same_state(tmp_path / "1", tmp_path / "3")


def test_without_the_switch_the_bits_differ(images, on_one_rank, tmp_path):
    """So equal bits above are no accident."""
    flags = (*SETTINGS, "--no-mix-token", "--drop-path", "0", "--global-batch", "12", "--batch-size")
    for ranks, batch in ((1, "12"), (2, "6")):
        runs.start(images, tmp_path / str(ranks), *flags, batch, ranks=ranks)
    one, two = state(tmp_path / "1"), state(tmp_path / "2")
    assert any(not torch.equal(one[name], two[name]) for name in one if name.startswith("model "))


def test_a_run_goes_on_with_other_ranks(images, on_one_rank, tmp_path):
    start(images, tmp_path, ranks=3, stop_at=2)
    start(images, tmp_path, "--resume", "auto", ranks=1, stop_at=4)
    start(images, tmp_path, "--resume", "auto", "--shard-optimizer", ranks=2)
    assert_same_state(on_one_rank, tmp_path)


@pytest.mark.parametrize(("task", "colors"), [("segmentation", "--photometric"), ("detection", "--hue 18")])
def test_dense_tasks(tmp_path, task, colors):
    make_scene_set(tmp_path / "scenes", train=24, val=6, side=64)
    small = ("--recipe", f"{task}_demo", "--img-size", "64", "--epochs", "1", "--warmup-epochs", "0")
    small += ("--drop-path", "0.2", *colors.split(), *REPRODUCIBLE, "--micro-batch", "4", "--sync-bn", "none")
    for ranks in (1, 2):
        runs.start(tmp_path / "scenes", tmp_path / str(ranks), small=small, ranks=ranks)
    assert_same_state(tmp_path / "1", tmp_path / "2")


def test_ranks_that_are_lost_and_added_change_nothing(demo_images, tmp_path):
    """4 ranks, then 2, then 3, of which one is killed, and its host comes back."""
    images, flags = demo_images(60, 10), ("--epochs", "20", "--eval-every", "20", "--compression", "none")
    flags = (*flags, *REPRODUCIBLE)
    hosts = "localhost:2,127.0.0.1:2"
    with elastic_run.on_this_machine(tmp_path, images, hosts, *flags, plain=False) as trial:
        trial.train_on(4)
        trial.change_hosts("localhost:2")
        trial.train_on(2, formations=2)
        trial.change_hosts("localhost:2,127.0.0.1:1")
        trial.train_on(3, formations=3)
        trial.signal_rank("127.0.0.1", signal.SIGKILL)
        assert trial.process.wait(240) == 0, trial.output
        assert trial.formations()[:4] == [4, 2, 3, 2], trial.output
        assert "20 epochs are complete: each of 60 images was taken once" in check_ledger(trial.run)
    runs.start(images, tmp_path / "alone", *flags, small=("--recipe", "demo", *elastic_run.SETTINGS), ranks=1)
    assert_same_state(tmp_path / "alone", trial.run.parent)


def test_batches_that_cannot_be_shared():
    def config(**settings: Any) -> Any:
        return assemble(
            {"reproducible": True, "global_batch": 96, "batch_size": 16, **settings}, fallback_name=""
        )

    assert resolve(config(), 4).update.accumulation == 2
    with pytest.raises(UserError, match="96 has 6 micro-batches of --micro-batch 16, too few for 7 ranks"):
        resolve(config(), 7)
    with pytest.raises(UserError, match="100 is not a multiple of --micro-batch 16"):
        resolve(config(global_batch=100), 2)
    refused = {"--global-batch": {"global_batch": 0}, "--sync-bn none": {"sync_bn": "all"}}
    for flag, settings in (refused | {"--compile": {"compile": True}}).items():
        with pytest.raises(UserError, match=flag):
            check(config(**settings))
