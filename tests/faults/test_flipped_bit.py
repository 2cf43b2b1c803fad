"""A bit that flips in one rank's weights is found at the next checkpoint, and the steps are trained again."""

from __future__ import annotations

from horovod_volo.elastic.ledger import check_ledger
from tests.runs import FAILED, assert_same_state, only_error, start, steps

EVERY = ("--epochs", "2", "--eval-every", "2", "--checkpoint-every", "2", "--log-every", "1")
EVERY += ("--drop-path", "0.1", "--ema-decay", "0.9")
FOUND = "the weights or the optimizer state of rank 1 on "


def test_the_run_is_repaired(demo_images, tmp_path):
    images, hit, well = demo_images(72, 10), tmp_path / "hit", tmp_path / "well"  # 6 steps of 3 ranks
    shown = start(images, hit, *EVERY, fault="1:3:flip", ranks=3, start_with="mpi")
    assert shown.count(FOUND) == 1, shown
    assert shown.count("Back to step_00000002: the steps since then are trained again") == 1, shown
    assert FOUND not in start(images, well, *EVERY, ranks=3, start_with="mpi")
    assert_same_state(well, hit)
    assert "2 steps were trained again" in check_ledger(hit / "run")
    assert steps(hit) == list(range(1, 13))


def test_without_a_checkpoint(images, tmp_path):
    """Of two ranks nobody can tell which is right."""
    error = only_error(start(images, tmp_path, *EVERY, fault="1:0:flip", status=FAILED), "differ")
    assert "At step 2 the weights or the optimizer state of rank 0 on " in error
    assert "start again with --resume auto" in error
