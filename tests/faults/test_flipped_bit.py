"""A bit that flips in one rank's weights is found at the next checkpoint, and the steps are trained again."""

from __future__ import annotations

from pathlib import Path

from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.elastic.ledger import check_ledger
from tests.faults.runs import only_error, start, steps, weights

EVERY = ("--epochs", "2", "--eval-every", "2", "--checkpoint-every", "2", "--log-every", "1")
EVERY += ("--drop-path", "0.1", "--ema-decay", "0.9")


def test_the_run_is_repaired(tmp_path: Path) -> None:
    make_demo_set(tmp_path / "images", train=72, val=10)  # 6 steps of 3 ranks
    for name, fault in (("hit", "1:3:flip"), ("well", "1:99:flip")):
        status, output = start(
            tmp_path / "images", tmp_path / name, *EVERY, fault=fault, ranks=3, start_with="mpi"
        )
        assert status == 0, output
        assert output.count("the weights or the optimizer state of rank 1 on ") == (name == "hit"), output
        assert output.count("Back to step_00000002: the steps since then are trained again") == (
            name == "hit"
        ), output
    assert weights(tmp_path / "hit") == weights(tmp_path / "well")
    assert "2 steps were trained again" in check_ledger(tmp_path / "hit" / "run")
    assert steps(tmp_path / "hit") == list(range(1, 13))


def test_without_a_checkpoint(images: Path, tmp_path: Path) -> None:
    """Of two ranks nobody can tell which is right."""
    status, output = start(images, tmp_path, *EVERY, fault="1:0:flip")
    assert status not in (0, 75), output
    error = only_error(output, "differ")
    assert "At step 2 the weights or the optimizer state of rank 0 on " in error
    assert "start again with --resume auto" in error
