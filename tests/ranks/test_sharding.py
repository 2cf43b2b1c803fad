"""Ranks that share out the optimizer end where ranks end that each keep all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from horovod_volo.data.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of, train

STEPS = ("--steps", "50")
# Two ranks have one sum; three have several, by their order, and a norm has one for each way to cut it.
# AdamW makes whole steps of what rounding leaves of a gradient that is nearly 0, and training doubles a
# difference every few steps: to see past that, double precision.
CASES = {
    "2-gloo": (2, "gloo", ()),
    "2-gloo-fp16": (2, "gloo", ("--compression", "fp16")),
    "2-mpi-clip": (2, "mpi", ("--clip", "0.5", "--double", "--lr", "1e-3")),
    "3-gloo": (3, "gloo", ("--double",)),
    "3-mpi": (3, "mpi", ("--double",)),
    "3-gloo-sgd": (3, "gloo", ("--opt", "sgd", "--lr", "1e-3", "--double")),
}


@pytest.mark.parametrize(("ranks", "start_with", "more"), CASES.values(), ids=CASES)
def test_fifty_steps_end_at_the_same_weights(
    ranks: int, start_with: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    plain: list[dict[str, Any]] = ranks_of(
        "reducer", tmp_path / "plain", *STEPS, *more, ranks=ranks, start_with=start_with
    )
    sharded = ranks_of(
        "reducer", tmp_path / "shard", *STEPS, *more, "--shard", ranks=ranks, start_with=start_with
    )
    expected = plain[0]["weights"]
    assert plain[0]["moved"] > 1e-3
    for rank in sharded:
        assert torch.equal(rank["weights"], sharded[0]["weights"])
        assert (rank["weights"] - expected).abs().max() <= 1e-6
        assert rank["state"].keys() == plain[0]["state"].keys()
    for name, tensor in plain[0]["state"].items():
        assert (sharded[0]["state"][name] - tensor).abs().max() <= 1e-6, name
    # Each has its part of the two averages; no rank much more than another.
    elements = [rank["state_elements"] for rank in sharded]
    assert sum(elements) == plain[0]["state_elements"]
    assert max(elements) <= 1.02 * sum(elements) / ranks


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_an_overflow_in_one_share_is_skipped_by_all(tmp_path: Path, compression: str) -> None:
    arguments = ("--overflow-on", "1", "--compression", compression, "--shard")
    for rank in ranks_of("reducer", tmp_path, *arguments, ranks=3, start_with="gloo"):
        assert rank["moved"] == 0.0
        assert rank["scale"] == 512.0


SMALL = ("--recipe", "demo", "--img-size", "32", "--epochs", "2", "--warmup-epochs", "1", "--clip-grad", "1")
MORE = ("--ema-decay", "0.9", "--drop-path", "0.0", "--hflip", "0.5", "--eval-every", "2")


def start(images: Path, output: Path, ranks: int, *arguments: str, batch: int) -> None:
    done = train(
        str(images),
        *SMALL,
        *MORE,
        "--output",
        str(output),
        "--name",
        "run",
        "--batch-size",
        str(batch),
        "--resume",
        "auto",
        *arguments,
        ranks=ranks,
        start_with="none" if ranks == 1 else "gloo",
    )
    assert done.returncode in (0, 75) or "stopped at step" in done.stdout, done.stdout


def files_of(output: Path, checkpoint: str = "last") -> dict[str, dict[str, torch.Tensor]]:
    folder = output / "run" / "checkpoints" / checkpoint
    return {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 ranks, then 3, then 1; what each has loaded is to the bit what the one before has saved."""
    images = tmp_path / "set"
    make_demo_set(images, train=60, val=20)  # 5 steps an epoch of 12 images each
    for name, shard in (("plain", ()), ("shard", ("--shard-optimizer",))):
        output = tmp_path / name
        start(images, output, 2, *shard, "--stop-at-step", "3", batch=6)
        saved = files_of(output, "step_00000003")
        assert saved.keys() == {"model", "optimizer", "ema"}
        for ranks in (2, 3, 1):
            loaded = ranks_of(
                "state",
                output / f"on_{ranks}",
                str(output / "run"),
                *shard,
                ranks=ranks,
                start_with="none" if ranks == 1 else "gloo",
            )
            for rank in loaded:
                assert rank["step"] == 3
                for file, tensors in saved.items():
                    for key, tensor in tensors.items():
                        assert torch.equal(rank[file][key], tensor), (ranks, file, key)
        start(images, output, 3, *shard, "--stop-at-step", "7", batch=4)
        start(images, output, 1, *shard, batch=12)
    plain, shard = files_of(tmp_path / "plain"), files_of(tmp_path / "shard")
    assert plain["optimizer"].keys() == shard["optimizer"].keys()
    for file, tensors in plain.items():
        for key, tensor in tensors.items():
            assert (shard[file][key] - tensor).abs().max() <= 1e-5, (file, key)
    assert float(plain["optimizer"]["head.weight/step"]) == 10.0


def test_a_checkpoint_may_be_gone_on_from_without_sharding_and_with(tmp_path: Path) -> None:
    images = tmp_path / "set"
    make_demo_set(images, train=60, val=20)
    start(images, tmp_path, 2, "--shard-optimizer", "--stop-at-step", "2", batch=6)
    start(images, tmp_path, 2, "--stop-at-step", "4", batch=6)
    start(images, tmp_path, 2, "--shard-optimizer", batch=6)
    assert float(files_of(tmp_path)["optimizer"]["head.weight/step"]) == 10.0
