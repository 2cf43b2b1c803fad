"""What ranks compute together equals what one rank computes of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from horovod_volo.bench.synthetic import catalog_without_files
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.engine.accuracy import ImageScores
from tests.ranks.launching import alone, on_ranks, python, run
from tests.ranks.steps import MUON_STEPS, MuonSteps, NormStep, Steps

Call = Callable[[World], Any]
PLAIN, HALVES = Steps(), Steps(micro_batches=2)
# Two steps on the same weights: gradients of the first are not compressed.
COMPRESSED = [Steps(compression="fp16", steps=2, lr=0.0, times=times) for times in (1.0, 1e-7)]
OVERFLOWS = [Steps(overflow_on=1), Steps(overflow_on=1, compression="fp16"), Steps(overflow_on=1, opt="muon")]
# The sum over two ranks does not depend on their order: nothing may differ. That over three does, and Horovod
# fuses what is ready; rounding errors double every few steps, and stay small in double precision alone.
ROUNDING = 1e-8
FIFTY = {
    (2, "gloo"): [Steps(steps=50), Steps(steps=50, compression="fp16")],
    (3, "gloo"): [Steps(steps=50, lr=1e-3, double=True)],
    (3, "mpi"): [
        Steps(steps=50, lr=1e-3, double=True, clip=0.5),
        Steps(steps=50, lr=1e-3, double=True, opt="sgd"),
    ],
}
# A vector of seven elements, of which two of three ranks have none.
ONE_PARAMETER = Steps(train_only="head.bias", double=True, clip=0.5, steps=5)
ONE_PARAMETERS = [ONE_PARAMETER, replace(ONE_PARAMETER, opt="sgd")]
SHARDS_OVERFLOW = [
    *(Steps(overflow_on=1, compression=compression, sharded=True) for compression in ("none", "fp16")),
    Steps(overflow_on=1, sharded=True, train_only="head.bias"),
]
MUON = [MuonSteps("odd shapes"), MuonSteps("one matrix"), MuonSteps("volo"), MuonSteps("volo", in_bf16=True)]
# VOLO's stem has norms of its own, which take one rank's images unless all are connected.
HEADS, ALL, RECOMPUTED = NormStep((3, 3)), NormStep((1, 2, 3), "all"), NormStep((4, 1), recomputed=True)
# The neck's first and second norms; pooling with laterals and auxiliary head, bottleneck, pyramid, fusion.
ROUNDS = 6
PREDICTIONS = 33


def both(cases: list[Steps]) -> list[Steps]:
    return [replace(case, sharded=sharded) for case in cases for sharded in (False, True)]


def predictions(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect made-up predictions of each rank's images, some of which are damaged."""
    logits = torch.randn(PREDICTIONS, 10, generator=torch.Generator().manual_seed(0))
    targets = np.where(np.arange(PREDICTIONS) % 6 == 0, NO_CLASS, 1)
    scores = ImageScores(torch.device("cpu"))
    own = np.arange(world.rank, PREDICTIONS, world.size)
    for indices in np.split(own, range(4, len(own), 4)):
        batch = EvalBatch(torch.empty(0), torch.from_numpy(targets[indices]), indices)
        scores.add(batch, logits[indices])
    counts, found, probabilities = scores.gather(catalog_without_files(PREDICTIONS, 10), world)
    exact = counts._replace(loss_sum=round(counts.loss_sum, 4))  # it is rounded as the batches are added
    return torch.tensor(exact), torch.from_numpy(found), torch.from_numpy(probabilities)


def collectives(world: World) -> dict[str, Any]:
    """Return the results of World's attributes and collectives on this rank."""
    rows = world.gather(torch.full((3,), float(world.rank)), "rows")
    number = torch.tensor(world.rank)
    tensors = [torch.full((2, 2), float(world.rank)), number, torch.tensor([world.is_rank_zero])]
    world.broadcast_(tensors)
    world.assert_identical(tensors[:1], "broadcast tensors")
    channels_last = torch.full((2, 3, 4, 5), float(world.rank)).to(memory_format=torch.channels_last)
    world.broadcast_([channels_last])
    weights = torch.ones(1000)
    if world.rank == world.size - 1:
        weights.view(torch.int32)[7] ^= 1
    with pytest.raises(RuntimeError) as divergence:
        world.assert_identical([weights], "Weights")
    with pytest.raises(AllRanksError) as problem:
        world.run_on_all_ranks(lambda: fail_on(world.size - 1, world))
    return {
        "ranks": [world.rank, world.size, world.local_rank, world.local_size],
        "controller": world.controller,
        "total": world.sum_over_ranks(world.rank, 2.0**40 + world.rank),
        "rows": rows.tolist(),
        "broadcast": [tensor.tolist() for tensor in tensors],
        "channels_last_sum": float(channels_last.sum()),
        "gathered": world.allgather_object(f"from {world.rank}"),
        "broadcast_object": world.broadcast_object(f"from {world.rank}"),
        "problem": str(problem.value),
        "divergence": str(divergence.value),
    }


def fail_on(rank: int, world: World) -> None:
    if world.rank == rank:
        raise UserError("the disk is missing")


CALLS: dict[tuple[int, str], list[Call]] = {
    (2, "gloo"): [PLAIN, HALVES, *COMPRESSED, *OVERFLOWS, *both(FIFTY[2, "gloo"]), *MUON, HEADS, RECOMPUTED],
    (3, "gloo"): [
        collectives,
        *(*COMPRESSED, *both(FIFTY[3, "gloo"]), *both(ONE_PARAMETERS), *SHARDS_OVERFLOW, *MUON, ALL),
        predictions,
    ],
    (3, "mpi"): [collectives, PLAIN, HALVES, *both(FIFTY[3, "mpi"]), *MUON, ALL],
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[Call, list[Any]]]:
    """Return a function that gives the results of each rank by case, from one launch for each argument."""

    @functools.cache
    def compute(ranks: int, start_with: str) -> dict[Call, list[Any]]:
        calls = CALLS[ranks, start_with]
        found = on_ranks(tmp_path_factory.mktemp("launch"), *calls, ranks=ranks, start_with=start_with)
        return dict(zip(calls, found, strict=True))

    return compute


one_rank = functools.cache(alone)


@pytest.mark.parametrize(("start_with", "controller"), [("gloo", "gloo"), ("mpi", "MPI")])
def test_collectives_give_what_they_promise(launch, start_with, controller):
    check(launch(3, start_with)[collectives], controller)


@pytest.mark.parametrize(("ranks", "start_with"), [(2, "gloo"), (3, "mpi")])
@pytest.mark.parametrize("case", [PLAIN, HALVES], ids=["one micro-batch", "two"])
def test_gradients_are_those_of_the_whole_batch(launch, ranks, start_with, case):
    found, expected = launch(ranks, start_with)[case], one_rank(PLAIN)["gradients"]
    assert found[0]["buckets"] > 2
    assert expected.abs().max() > 1e-2
    for rank in found:
        assert torch.allclose(rank["gradients"], expected, rtol=0, atol=1e-6)
        assert torch.equal(rank["weights"], found[0]["weights"])
    assert torch.allclose(one_rank(HALVES)["gradients"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", COMPRESSED, ids=["as-is", "tiny"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_fp16_compression_adds_only_rounding_errors(launch, ranks, case):
    found, exact = launch(ranks, "gloo")[case], one_rank(replace(case, compression="none"))["gradients"]
    for rank in found:
        error = (rank["gradients"] - exact).abs()
        # Each rank's gradient and each partial sum is rounded, with a relative error of up to 2^-11; the
        # gradient of one rank may be larger than the sum.
        assert error.max() < (2 * ranks - 1) * 2**-11 * exact.abs().max()
        assert error.median() < 2**-11 * exact.abs().median() * ranks
    assert all(torch.equal(found[0]["weights"], rank["weights"]) for rank in found)
    assert error.max() > 2**-14 * exact.abs().max(), "there is no rounding error of fp16: it was not used"


@pytest.mark.parametrize("case", [*OVERFLOWS, *SHARDS_OVERFLOW], ids=str)
def test_all_ranks_skip_a_step_that_overflows_on_one(launch, case):
    """Also ranks whose shard has no parameter. Without an overflow the same step changes the weights."""
    for rank in launch(3 if case.sharded else 2, "gloo")[case]:
        assert rank["moved"] == 0.0
        assert rank["scale"] == 512.0
        assert not any(tensor.any() for tensor in rank["state"].values())
        assert case.sharded or not rank["gradients"].isfinite().all()
    assert one_rank(PLAIN)["moved"] > 0.0


@pytest.mark.parametrize(
    ("ranks", "start_with", "case"), [(*key, case) for key in FIFTY for case in FIFTY[key]]
)
def test_a_sharded_optimizer_gives_the_same_weights(launch, ranks, start_with, case):
    found = launch(ranks, start_with)
    plain, sharded = found[case], found[replace(case, sharded=True)]
    assert plain[0]["moved"] > 1e-3
    for replicated, rank in zip(plain, sharded, strict=True):
        assert torch.equal(replicated["weights"], plain[0]["weights"])
        assert torch.equal(rank["weights"], sharded[0]["weights"])
    assert_same_training(plain, sharded, ROUNDING if case.double else 0.0)
    # Each rank has its shard of the two moments, and the shards have nearly equal sizes.
    elements = [rank["state_elements"] for rank in sharded]
    assert sum(elements) == plain[0]["state_elements"]
    assert max(elements) <= 1.02 * sum(elements) / ranks
    assert sharded[0]["messages_of_state"] == sharded[0]["buckets"] > 2


@pytest.mark.parametrize("case", ONE_PARAMETERS, ids=["adamw", "sgd"])
def test_ranks_without_a_parameter_step_save_and_restore(launch, case):
    found = launch(3, "gloo")
    assert found[case][0]["moved"] > 1e-3
    assert_same_training(found[case], found[replace(case, sharded=True)], ROUNDING)


def assert_same_training(plain: list[Any], sharded: list[Any], bound: float) -> None:
    for rank in sharded:
        assert rank["restored"]
        assert (rank["weights"] - plain[0]["weights"]).abs().max() <= bound
    saved = sharded[0]["state"]
    assert saved.keys() == plain[0]["state"].keys()
    for name, tensor in plain[0]["state"].items():
        assert (saved[name] - tensor).abs().max() <= bound, name


@pytest.mark.parametrize(("ranks", "start_with"), CALLS)
@pytest.mark.parametrize("case", MUON, ids=str)
def test_muon_whose_matrices_are_shared_equals_muon_on_one_rank(launch, ranks, start_with, case):
    """With odd shapes, with fewer matrices than ranks, for VOLO, and in bf16."""
    found, expected = launch(ranks, start_with)[case], one_rank(case)
    assert expected["moved"] > 1e-2
    own = [rank["own"] for rank in found]
    assert sum(own) == len(expected["matrices"])
    assert case.network != "one matrix" or own == [1, *([0] * (ranks - 1))]
    for rank in found:
        assert rank["exchanges"] == MUON_STEPS  # one message a step
        assert torch.equal(rank["weights"], found[0]["weights"])
        difference = (rank["weights"] - expected["weights"]).abs().max()
        assert difference <= (1e-3 if case.in_bf16 else 1e-6)
        assert rank["state"].keys() == expected["state"].keys()
        for key, tensor in expected["state"].items():
            assert torch.equal(rank["state"][key], tensor), key


@pytest.mark.parametrize(
    ("start_with", "case", "exchanges"),
    [
        ("gloo", ALL, 2 * (ROUNDS + 3)),  # the stem's three follow each other
        ("mpi", ALL, 2 * (ROUNDS + 3)),
        ("gloo", RECOMPUTED, 2 * 2),  # a repeated forward exchanges nothing
    ],
)
def test_batch_norm_over_ranks_equals_that_of_the_whole_batch(launch, start_with, case, exchanges):
    found, expected = (
        launch(len(case.images), start_with)[case],
        one_rank(replace(case, images=(sum(case.images),))),
    )
    assert expected["gradients"].abs().max() > 1e-2
    assert found[0]["exchanges"] == exchanges
    begin = 0
    for rank, count in zip(found, case.images, strict=True):
        own = slice(begin, begin + count)
        assert torch.allclose(rank["logits"], expected["logits"][own], rtol=0, atol=1e-9)
        assert torch.allclose(rank["inputs"], expected["inputs"][own], rtol=0, atol=1e-9)
        assert torch.allclose(rank["gradients"], expected["gradients"], rtol=0, atol=1e-9)
        assert torch.allclose(rank["statistics"], expected["statistics"], rtol=0, atol=1e-6)
        begin += count


def test_batch_norm_of_heads_alone_leaves_that_of_the_stem(launch):
    found, expected = launch(2, "gloo")[HEADS], one_rank(replace(HEADS, images=(6,)))
    assert found[0]["norms"] == 19
    assert found[0]["exchanges"] == 2 * ROUNDS
    assert not torch.allclose(found[0]["logits"], expected["logits"][:3], atol=1e-6)


def test_predictions_are_gathered_by_image(launch):
    gathered, *_ = launch(3, "gloo")[predictions]
    expected = one_rank(predictions)
    assert (expected[1] == NO_CLASS).sum() == 6
    assert all(torch.equal(*pair) for pair in zip(gathered, expected, strict=True))


def check(found: list[dict[str, Any]], controller: str) -> None:
    """Assert that the results on all ranks are right."""
    ranks = len(found)
    for rank, result in enumerate(found):
        assert result == {
            "ranks": [rank, ranks, rank, ranks],
            "controller": controller,
            "total": [sum(range(ranks)), ranks * 2.0**40 + sum(range(ranks))],
            "rows": [[float(other)] * 3 for other in range(ranks)],
            "broadcast": [[[0.0, 0.0], [0.0, 0.0]], 0, [True]],
            "channels_last_sum": 0.0,
            "gathered": [f"from {other}" for other in range(ranks)],
            "broadcast_object": "from 0",
            "problem": f"the disk is missing (seen on rank {ranks - 1} of {ranks})",
            "divergence": f"Weights on rank {ranks - 1} differ from rank 0's.",
        }


def test_ranks_of_horovodrun_over_mpi_agree(tmp_path):
    (found,) = on_ranks(tmp_path, collectives, ranks=2, start_with="horovodrun-mpi")
    check(found, "MPI")


@pytest.mark.parametrize("plain", [True, False])
def test_a_warning_is_an_error(tmp_path, plain):
    """In an interpreter of its own, and in a fork of tests/ranks/fork_server.py."""
    (tmp_path / "program.py").write_text("import sys, warnings; warnings.warn(sys.argv[1])")
    command = [*python(plain), str(tmp_path / "program.py")]
    done = run([*command, "The .grad attribute of a Tensor that is not a leaf Tensor"])
    assert (done.returncode, done.stdout) == (0, "")
    done = run([*command, "of another kind"])
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "UserWarning: of another kind"
