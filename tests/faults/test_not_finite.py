"""A loss that is not finite on one rank: all ranks skip the step, then go back, then end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import train

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0")
EVERY = ("--checkpoint-every", "2", "--log-every", "1", "--drop-path", "0.1")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=80, val=20)  # 10 steps
    return folder


def start(
    images: Path, output: Path, fault: str, *arguments: str, start_with: str = "gloo", ranks: int = 2
) -> tuple[int, str]:
    done = train(
        *(str(images), *SMALL, *EVERY, "--output", str(output), "--name", "run"),
        *("--plugin", "tests.faults.injected", *arguments),
        ranks=ranks,
        start_with=start_with,
        INJECTED_FAULT=fault,
    )
    return done.returncode, done.stdout


def assert_finite(output: Path) -> None:
    for file in (output / "run" / "checkpoints" / "last").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.isfinite().all(), (file.name, name)


@pytest.mark.parametrize(
    ("start_with", "arguments"),
    [("gloo", ()), ("mpi", ("--compression", "fp16")), ("gloo", ("--precision", "fp16"))],
    ids=["fp32", "fp16 messages", "fp16"],
)
def test_one_loss_skips_one_step_on_all_ranks(
    images: Path, tmp_path: Path, start_with: str, arguments: tuple[str, ...]
) -> None:
    status, output = start(images, tmp_path, "1:4:nan", *arguments, start_with=start_with)
    assert status == 0, output
    assert output.count("is skipped") == 1, output
    assert "warning: step 5 is skipped: its loss is not finite on rank 1, samples " in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "lr" in record]
    assert steps == list(range(1, 11))  # rank 0's loss of step 5 is finite, and logged
    assert_finite(tmp_path)


@pytest.mark.parametrize(
    ("fault", "start_with", "arguments"),
    [
        ("1:4:inf-matrix", "gloo", ("--compression", "fp16")),
        ("1:4:nan-vector", "gloo", ("--compression", "fp16")),
        ("1:4:inf-matrix", "mpi", ("--compression", "none")),
        ("1:4:inf-matrix", "gloo", ("--shard-optimizer", "--clip-grad", "1")),
        ("1:4:inf-matrix", "gloo", ("--precision", "fp16")),
        ("0:4:inf-matrix", "none", ()),
    ],
    ids=["fp16 messages", "sums in fp32", "no compression", "sharded", "fp16", "one rank"],
)
def test_one_gradient_skips_one_step_on_all_ranks(
    images: Path, tmp_path: Path, fault: str, start_with: str, arguments: tuple[str, ...]
) -> None:
    """The loss is finite, and neither weights nor the state of optimizer and messages change."""
    ranks = 1 if start_with == "none" else 2
    more = (*arguments, "--stop-at-step", "5", "--batch-size", str(8 // ranks))
    status, output = start(images, tmp_path, fault, *more, start_with=start_with, ranks=ranks)
    assert status != 0, output
    assert "stopped at step 5 and saved" in output, output
    before, after = (tmp_path / "run" / "checkpoints" / f"step_{step:08}" for step in (4, 5))
    for name in ("model", "optimizer", "exchange"):
        if name == "exchange" and arguments != ("--compression", "fp16"):
            continue
        earlier, later = (load_file(folder / f"{name}.safetensors") for folder in (before, after))
        for tensor in earlier:
            # The gradient scaler skips the update alone.
            changes = ("running" in tensor and "--precision" in arguments) or "num_batches" in tensor
            assert changes or earlier[tensor].equal(later[tensor]), (name, tensor)
    of_rank = f"warning: step 5 is skipped: its gradients are not finite on rank {fault[0]}, samples "
    assert output.count(of_rank) == ("--precision" not in arguments), output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    until, then = (json.loads(line)["skipped_steps"] for line in lines[-2:])
    assert then - until == 1


def test_many_losses_return_to_the_last_checkpoint(images: Path, tmp_path: Path) -> None:
    status, output = start(images, tmp_path, "1:4-7:nan")
    assert status == 0, output
    assert output.count("is skipped") == 4, output
    assert output.count("back to the weights of step_00000004; training goes on after step 7") == 1, output
    assert "done: 10 steps" in output
    assert_finite(tmp_path)


def test_a_run_that_never_recovers_is_ended(images: Path, tmp_path: Path) -> None:
    """From its third step on no loss of the run's only epoch is finite, but there are 20 of them."""
    status, output = start(images, tmp_path, "1:2-99:nan", "--batch-size", "2")
    assert status not in (0, 75), output
    assert output.count("back to the weights of") == 3, output
    errors = [line for line in output.splitlines() if "error" in line and "finite" in line]
    assert len(errors) == 1, output
    assert "The loss or its gradients are not finite in steps 12 to 14, after 3 returns to a" in errors[0]
    assert "checkpoint. Lower --lr" in errors[0]
    assert_finite(tmp_path)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (1, ("--compression", "fp16", "--ema-decay", "0.9")),
        (5, ("--compression", "fp16", "--ema-decay", "0.9")),
        (5, ("--shard-optimizer", "--clip-grad", "1")),
    ],
)
def test_outcomes_that_are_known_one_step_late_change_nothing(
    images: Path, tmp_path: Path, step: int, arguments: tuple[str, ...]
) -> None:
    """As on several GPUs: the device skips the step, and the host learns it while it takes the next one."""
    weights, ledgers = [], []
    for name, plugins in (("at once", ""), ("late", ",tests.faults.late_outcomes")):
        given = ("--log-every", "4", "--checkpoint-every", "0", "--plugin", f"tests.faults.injected{plugins}")
        status, output = start(images, tmp_path / name, f"1:{step - 1}:inf-matrix", *arguments, *given)
        assert status == 0, output
        assert (
            output.count(f"warning: step {step} is skipped: its gradients are not finite on rank 1") == 1
        ), output
        checkpoint = tmp_path / name / "run" / "checkpoints" / "last"
        weights.append({file.name: load_file(file) for file in checkpoint.glob("*.safetensors")})
        ledgers.append((tmp_path / name / "run" / "ledger.jsonl").read_text().splitlines()[1:])
    assert ledgers[0] == ledgers[1]
    for file, tensors in weights[0].items():
        for tensor in tensors:
            assert tensors[tensor].equal(weights[1][file][tensor]), (file, tensor)


@pytest.mark.parametrize("first", [5, 7])
def test_losses_that_are_known_late_return_to_a_checkpoint_as_soon(
    images: Path, tmp_path: Path, first: int
) -> None:
    """With the second of them, the last of the three is the last but one step."""
    given = ("--log-every", "20", "--plugin", "tests.faults.injected,tests.faults.late_outcomes")
    status, output = start(images, tmp_path, f"1:{first - 1}-{first + 1}:nan", *given)
    assert status == 0, output
    assert output.count("is skipped") == 3, output
    assert f"training goes on after step {first + 2}" in output
    assert "done: 10 steps" in output
    assert_finite(tmp_path)
