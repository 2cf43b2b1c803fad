"""Training with a sharded optimizer gives the same weights as with one that is replicated on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of, train

STEPS = ("--steps", "50")
# The sum over two ranks does not depend on their order; that over three does, and the norm depends on the
# shards. With a learning rate of 1e-2 rounding errors double every few steps, so some cases use a lower one
# or double precision. AdamW's moments average gradients, which differ more than the weights.
FP32_OF_THREE = 1e-5
CASES = {
    "2-gloo": (2, "gloo", ()),
    "2-gloo-fp16": (2, "gloo", ("--compression", "fp16")),
    "2-mpi-clip": (2, "mpi", ("--clip", "0.5", "--double", "--lr", "1e-3")),
    "3-gloo": (3, "gloo", ("--lr", "1e-4")),
    "3-gloo-double": (3, "gloo", ("--double",)),
    "3-mpi-sgd": (3, "mpi", ("--opt", "sgd", "--lr", "1e-3", "--double")),
}
# A vector of seven elements, of which two of three ranks have none.
ONE_PARAMETER = ("--train-only", "head.bias")


@pytest.mark.parametrize(("ranks", "start_with", "more"), CASES.values(), ids=CASES)
def test_fifty_steps_give_the_same_weights(
    ranks: int, start_with: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    plain: list[dict[str, Any]] = ranks_of(
        "reducer", tmp_path, *STEPS, *more, "--shard", ranks=ranks, start_with=start_with
    )
    sharded = [rank["sharded"] for rank in plain]
    expected = plain[0]["weights"]
    assert plain[0]["moved"] > 1e-3
    for rank in sharded:
        assert torch.equal(rank["weights"], sharded[0]["weights"])
        assert rank["restored"]
        assert (rank["weights"] - expected).abs().max() <= 1e-6
    assert sharded[0]["state"].keys() == plain[0]["state"].keys()
    for name, tensor in plain[0]["state"].items():
        bound = 1e-6 if ranks == 2 or "--double" in more else FP32_OF_THREE
        assert (sharded[0]["state"][name] - tensor).abs().max() <= bound, name
    # Each rank has its shard of the two moments, and the shards have nearly equal sizes.
    elements = [rank["state_elements"] for rank in sharded]
    assert sum(elements) == plain[0]["state_elements"]
    assert max(elements) <= 1.02 * sum(elements) / ranks


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_all_ranks_skip_a_step_that_overflows_in_one_shard(tmp_path: Path, compression: str) -> None:
    arguments = ("--overflow-on", "1", "--compression", compression, "--shard")
    for rank in ranks_of("reducer", tmp_path, *arguments, ranks=3, start_with="gloo"):
        assert rank["sharded"]["moved"] == 0.0
        assert rank["sharded"]["scale"] == 512.0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ranks_without_a_parameter_step_save_and_restore(tmp_path: Path, optimizer: str) -> None:
    arguments = (*ONE_PARAMETER, "--opt", optimizer, "--steps", "5", "--clip", "0.5", "--double", "--shard")
    ranks = ranks_of("reducer", tmp_path, *arguments, ranks=3, start_with="gloo")
    assert ranks[0]["moved"] > 1e-3
    for rank in ranks:
        assert (rank["sharded"]["weights"] - ranks[0]["weights"]).abs().max() <= 1e-6
        assert rank["sharded"]["restored"]
    saved = ranks[0]["sharded"]["state"]
    assert saved.keys() == ranks[0]["state"].keys()
    for name, tensor in ranks[0]["state"].items():
        assert (saved[name] - tensor).abs().max() <= 1e-6, name


def test_ranks_without_a_parameter_skip_a_step_that_overflows(tmp_path: Path) -> None:
    arguments = (*ONE_PARAMETER, "--overflow-on", "1", "--shard")
    for rank in ranks_of("reducer", tmp_path, *arguments, ranks=3, start_with="gloo"):
        assert rank["sharded"]["moved"] == 0.0
        assert rank["sharded"]["scale"] == 512.0


SMALL = ("--recipe", "demo", "--img-size", "32", "--epochs", "2", "--warmup-epochs", "1", "--clip-grad", "0")
MORE = ("--ema-decay", "0.9", "--drop-path", "0.0", "--hflip", "0.5", "--eval-every", "2")


def start(images: Path, output: Path, ranks: int, *arguments: str, batch: int) -> None:
    paths = ("--output", str(output), "--name", "run", "--resume", "auto", "--batch-size", str(batch))
    start_with = "none" if ranks == 1 else "gloo"
    done = train(str(images), *SMALL, *MORE, *paths, *arguments, ranks=ranks, start_with=start_with)
    assert done.returncode in (0, 75) or "stopped at step" in done.stdout, done.stdout


def files_of(output: Path, checkpoint: str = "last") -> dict[str, dict[str, torch.Tensor]]:
    folder = output / "run" / "checkpoints" / checkpoint
    return {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=60, val=20)  # 5 steps of 12 images per epoch
    return folder


def test_a_resumed_sharded_run_is_bit_identical_to_an_unsharded_one(images: Path, tmp_path: Path) -> None:
    plain, shard = tmp_path / "plain", tmp_path / "shard"
    start(images, plain, 2, batch=6)
    start(images, shard, 2, "--shard-optimizer", "--stop-at-step", "3", batch=6)
    start(images, shard, 2, "--stop-at-step", "7", batch=6)  # a resumed run may use an unsharded optimizer
    start(images, shard, 2, "--shard-optimizer", batch=6)
    expected, found = files_of(plain), files_of(shard)
    assert expected.keys() == found.keys() == {"model", "optimizer", "ema"}
    for file, tensors in expected.items():
        assert tensors.keys() == found[file].keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[file][key], tensor), (file, key)


def test_a_run_resumes_on_other_numbers_of_ranks(images: Path, tmp_path: Path) -> None:
    """2 ranks, then 3, then 1: each run loads exactly the state that the previous one has saved."""
    flag = "--shard-optimizer"
    # Number of ranks, the step at which they stop, and the number of ranks that resume.
    for ranks, stop, others in ((2, 3, 3), (3, 7, 1), (1, 0, 0)):
        start(images, tmp_path, ranks, flag, "--stop-at-step", str(stop), batch=12 // ranks)
        saved = files_of(tmp_path)
        if others:
            first, *rest = ranks_of(
                "state",
                tmp_path / f"{ranks}_on_{others}",
                str(tmp_path / "run"),
                flag,
                ranks=others,
                start_with="none" if others == 1 else "gloo",
            )
            assert first["step"] == stop
            for file, tensors in saved.items():
                for key, tensor in tensors.items():
                    assert torch.equal(first[file][key], tensor), (others, file, key)
                    if file != "optimizer":  # only rank 0 gathers a sharded optimizer's state
                        assert all(torch.equal(rank[file][key], tensor) for rank in rest), (file, key)
    assert float(files_of(tmp_path)["optimizer"]["head.weight/step"]) == 10.0
