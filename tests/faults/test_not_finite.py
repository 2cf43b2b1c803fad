"""A loss or gradient that is not finite on one rank, or a bit that flips: all ranks go back together."""

from __future__ import annotations

import re

import pytest

from horovod_volo.elastic.ledger import check_ledger
from tests.runs import FAILED, assert_finite, assert_same_state, only_error, records, start, state, steps

EVERY = ("--checkpoint-every", "2", "--log-every", "1", "--drop-path", "0.1")
FP16_MESSAGES, LATE = ("--compression", "fp16"), "0:0:late 1:0:late "
SKIPPED = "warning: step {} is skipped: its {} not finite on rank {}, samples "


@pytest.mark.parametrize(
    ("ranks", "start_with", "gradient", "flags"),
    [
        (2, "gloo", "inf-matrix", FP16_MESSAGES),
        (2, "mpi", "nan-vector", ("--compression", "none")),
        (2, "gloo", "inf-matrix", ("--shard-optimizer", "--clip-grad", "1")),
        (2, "gloo", "inf-matrix", ("--precision", "fp16")),
        (1, "none", "inf-matrix", ()),
    ],
    ids=["fp16 messages", "no compression", "sharded", "fp16", "one rank"],
)
def test_one_number_skips_one_step_on_all_ranks(images, tmp_path, ranks, start_with, gradient, flags):
    """A loss in step 3, and in step 5 a gradient of a finite loss: neither weights nor state change in it."""
    rank = ranks - 1
    more = (*EVERY, *flags, "--batch-size", str(8 // ranks))
    fault = f"{rank}:2:nan {rank}:4:{gradient}"
    shown = start(images, tmp_path, *more, fault=fault, start_with=start_with, ranks=ranks, stop_at=5)
    assert shown.count(SKIPPED.format(3, "loss is", rank)) == 1, shown
    is_scaled = "--precision" in flags  # the gradient scaler skips the update alone
    assert shown.count(SKIPPED.format(5, "gradients are", rank)) == (not is_scaled), shown
    before, after = (state(tmp_path, f"step_{step:08}") for step in (4, 5))
    for name, tensor in before.items():
        changes = ("running" in name and is_scaled) or "num_batches" in name
        assert changes or tensor.equal(after[name]), name
    assert_finite(tmp_path)
    until, then = (record["skipped_steps"] for record in records(tmp_path, "lr")[-2:])
    assert then - until == 1
    if ranks > 1:
        assert steps(tmp_path) == [1, 2, 3, 4, 5]  # rank 0's loss of step 3 is finite, and logged


def test_a_run_that_never_recovers_is_ended(images, tmp_path):
    """From its third step on no loss of the run's only epoch is finite, but there are 20 of them."""
    shown = start(images, tmp_path, *EVERY, "--batch-size", "2", fault="1:2-99:nan", status=FAILED)
    assert shown.count("back to the weights of") == 3, shown
    error = only_error(shown, "finite")
    assert "not finite in steps 12 to 14, after 3 returns" in error
    assert "Lower --lr" in error
    assert_finite(tmp_path)


def test_fp16_gradients_that_overflow_at_any_loss_scale_end_the_run(images, tmp_path):
    flags = (*EVERY, "--batch-size", "2", "--precision", "fp16")
    shown = start(images, tmp_path, *flags, fault="0:4-99:inf-matrix", ranks=1, status=FAILED)
    assert "after 3 returns to a checkpoint. Lower --lr" in only_error(shown, "finite")
    newest, *older = re.findall(r"back to the weights of (step_\d+)", shown)
    assert newest > older[0] > older[1]


def test_outcomes_that_are_known_one_step_late_change_nothing(images, tmp_path):
    """As on several GPUs: the device skips the step, and the host learns it while it takes the next one."""
    flags = (*FP16_MESSAGES, "--shard-optimizer", "--ema-decay", "0.9")
    flags += ("--clip-grad", "1", "--drop-path", "0.1")
    ledgers = []
    for name, late in (("at once", ""), ("late", LATE)):
        fault = f"{late}1:0,4:inf-matrix"
        shown = start(images, tmp_path / name, *flags, "--log-every", "4", fault=fault)
        for step in (1, 5):
            assert shown.count(SKIPPED.format(step, "gradients are", 1)) == 1, shown
        ledgers.append((tmp_path / name / "run" / "ledger.jsonl").read_text().splitlines()[1:])
    assert ledgers[0] == ledgers[1]
    assert_same_state(tmp_path / "at once", tmp_path / "late")


def test_losses_that_are_known_late_return_to_a_checkpoint_as_soon(images, tmp_path):
    """The last of three losses is that of an epoch's last step, which is saved; then, of the last but one."""
    flags = (*EVERY, "--epochs", "2", "--batch-size", "4", "--log-every", "40")
    shown = start(images, tmp_path, *flags, fault=f"{LATE}1:7-12,16-18:nan")
    assert shown.count("is skipped") == 9, shown
    for saved, step in ((6, 10), (4, 13), (16, 19)):
        assert f"back to the weights of step_{saved:08}; training goes on after step {step}" in shown
    assert "done: 20 steps" in shown
    assert_finite(tmp_path)


OFTEN = ("--epochs", "2", "--eval-every", "2", "--checkpoint-every", "2", "--log-every", "1")
OFTEN += ("--drop-path", "0.1", "--ema-decay", "0.9")
FOUND = "the weights or the optimizer state of rank 1 on "


def test_the_run_is_repaired(demo_images, tmp_path):
    images, hit, well = demo_images(72, 10), tmp_path / "hit", tmp_path / "well"  # 6 steps of 3 ranks
    shown = start(images, hit, *OFTEN, fault="1:3:flip", ranks=3, start_with="mpi")
    assert shown.count(FOUND) == 1, shown
    assert shown.count("Back to step_00000002: the steps since then are trained again") == 1, shown
    assert FOUND not in start(images, well, *OFTEN, ranks=3, start_with="mpi")
    assert_same_state(well, hit)
    assert "2 steps were trained again" in check_ledger(hit / "run")
    assert steps(hit) == list(range(1, 13))


def test_without_a_checkpoint(images, tmp_path):
    """Of two ranks nobody can tell which is right."""
    error = only_error(start(images, tmp_path, *OFTEN, fault="1:0:flip", status=FAILED), "differ")
    assert "At step 2 the weights or the optimizer state of rank 0 on " in error
    assert "start again with --resume auto" in error
