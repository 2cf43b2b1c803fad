"""A loss that is not finite on one rank: all ranks skip the step, then go back, then end the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.faults.runs import INJECTED, assert_finite, only_error, records, start, steps, weights

EVERY = ("--checkpoint-every", "2", "--log-every", "1", "--drop-path", "0.1")
FP16_MESSAGES, LATE = ("--compression", "fp16"), f"{INJECTED},tests.faults.late_outcomes"


def last(output: Path) -> Path:
    return output / "run" / "checkpoints" / "last"


@pytest.mark.parametrize(
    ("start_with", "flags"), [("mpi", FP16_MESSAGES), ("gloo", ("--precision", "fp16"))], ids=["fp32", "fp16"]
)
def test_one_loss_skips_one_step_on_all_ranks(
    images: Path, tmp_path: Path, start_with: str, flags: tuple[str, ...]
) -> None:
    status, output = start(images, tmp_path, *EVERY, *flags, fault="1:4:nan", start_with=start_with)
    assert status == 0, output
    assert output.count("is skipped") == 1, output
    assert "warning: step 5 is skipped: its loss is not finite on rank 1, samples " in output
    assert steps(tmp_path) == list(range(1, 11))  # rank 0's loss of step 5 is finite, and logged
    assert_finite(last(tmp_path))


@pytest.mark.parametrize(
    ("fault", "start_with", "flags"),
    [
        ("1:4:inf-matrix", "gloo", FP16_MESSAGES),
        ("1:4:nan-vector", "gloo", FP16_MESSAGES),
        ("1:4:inf-matrix", "mpi", ("--compression", "none")),
        ("1:4:inf-matrix", "gloo", ("--shard-optimizer", "--clip-grad", "1")),
        ("1:4:inf-matrix", "gloo", ("--precision", "fp16")),
        ("0:4:inf-matrix", "none", ()),
    ],
    ids=["fp16 messages", "sums in fp32", "no compression", "sharded", "fp16", "one rank"],
)
def test_one_gradient_skips_one_step_on_all_ranks(
    images: Path, tmp_path: Path, fault: str, start_with: str, flags: tuple[str, ...]
) -> None:
    """The loss is finite, and neither weights nor the state of optimizer and messages change."""
    ranks = 1 if start_with == "none" else 2
    more = (*EVERY, *flags, "--stop-at-step", "5", "--batch-size", str(8 // ranks))
    _, output = start(images, tmp_path, *more, fault=fault, start_with=start_with, ranks=ranks)
    assert "stopped at step 5 and saved" in output, output
    before, after = (tmp_path / "run" / "checkpoints" / f"step_{step:08}" for step in (4, 5))
    for name in ("model", "optimizer", *(["exchange"] if flags == FP16_MESSAGES else [])):
        earlier, later = (load_file(folder / f"{name}.safetensors") for folder in (before, after))
        for tensor in earlier:
            # The gradient scaler skips the update alone.
            changes = ("running" in tensor and "--precision" in flags) or "num_batches" in tensor
            assert changes or earlier[tensor].equal(later[tensor]), (name, tensor)
    warning = f"warning: step 5 is skipped: its gradients are not finite on rank {fault[0]}, samples "
    assert output.count(warning) == ("--precision" not in flags), output
    until, then = (record["skipped_steps"] for record in records(tmp_path)[-2:])
    assert then - until == 1


def test_many_losses_return_to_the_last_checkpoint(images: Path, tmp_path: Path) -> None:
    status, output = start(images, tmp_path, *EVERY, fault="1:4-7:nan")
    assert status == 0, output
    assert output.count("is skipped") == 4, output
    assert output.count("back to the weights of step_00000004; training goes on after step 7") == 1, output
    assert "done: 10 steps" in output
    assert_finite(last(tmp_path))


def test_a_run_that_never_recovers_is_ended(images: Path, tmp_path: Path) -> None:
    """From its third step on no loss of the run's only epoch is finite, but there are 20 of them."""
    status, output = start(images, tmp_path, *EVERY, "--batch-size", "2", fault="1:2-99:nan")
    assert status not in (0, 75), output
    assert output.count("back to the weights of") == 3, output
    error = only_error(output, "finite")
    assert "not finite in steps 12 to 14, after 3 returns" in error
    assert "Lower --lr" in error
    assert_finite(last(tmp_path))


@pytest.mark.parametrize(
    ("skipped", "flags"),
    [((1, 5), (*FP16_MESSAGES, "--ema-decay", "0.9")), ((5,), ("--shard-optimizer", "--clip-grad", "1"))],
)
def test_outcomes_that_are_known_one_step_late_change_nothing(
    images: Path, tmp_path: Path, skipped: tuple[int, ...], flags: tuple[str, ...]
) -> None:
    """As on several GPUs: the device skips the step, and the host learns it while it takes the next one."""
    fault = f"1:{','.join(str(step - 1) for step in skipped)}:inf-matrix"
    more = (*EVERY, *flags, "--log-every", "4", "--checkpoint-every", "0")
    ledgers = []
    for name, plugins in (("at once", INJECTED), ("late", LATE)):
        status, output = start(images, tmp_path / name, *more, fault=fault, plugins=plugins)
        assert status == 0, output
        for step in skipped:
            warning = f"warning: step {step} is skipped: its gradients are not finite on rank 1"
            assert output.count(warning) == 1, output
        ledgers.append((tmp_path / name / "run" / "ledger.jsonl").read_text().splitlines()[1:])
    assert ledgers[0] == ledgers[1]
    assert weights(tmp_path / "at once") == weights(tmp_path / "late")


@pytest.mark.parametrize("first", [5, 7])
def test_losses_that_are_known_late_return_to_a_checkpoint_as_soon(
    images: Path, tmp_path: Path, first: int
) -> None:
    """With the second of them, the last of the three is the last but one step."""
    fault = f"1:{first - 1}-{first + 1}:nan"
    status, output = start(images, tmp_path, *EVERY, "--log-every", "20", fault=fault, plugins=LATE)
    assert status == 0, output
    assert output.count("is skipped") == 3, output
    assert f"training goes on after step {first + 2}" in output
    assert "done: 10 steps" in output
    assert_finite(last(tmp_path))
