"""Gradients of two ranks with half of a batch each equal those of one rank with the whole batch."""

import functools

import pytest
import torch

from tests.ranks.launching import ranks_of


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Return a cached function from worker arguments to the result of one rank with the whole batch."""

    @functools.cache
    def compute(*arguments):
        folder = tmp_path_factory.mktemp("alone")
        (alone,) = ranks_of("reducer", folder, *arguments, ranks=1, start_with="none")
        return alone

    return compute


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_ranks_equal_one(tmp_path, one_rank, start_with, micro_batches):
    arguments = ("--micro-batches", str(micro_batches))
    found = ranks_of("reducer", tmp_path, *arguments, ranks=2, start_with=start_with)
    expected = one_rank()["gradients"]
    assert found[0]["buckets"] > 2
    assert expected.abs().max() > 1e-2
    for rank in found:
        assert torch.allclose(rank["gradients"], expected, rtol=0, atol=1e-6)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert torch.allclose(one_rank("--micro-batches", "2")["gradients"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("times", [1.0, 1e-7], ids=["as-is", "tiny"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_fp16_compression_adds_only_rounding_errors(tmp_path, one_rank, ranks, times):
    # Two steps on the same weights: gradients of the first are not compressed.
    arguments = ("--steps", "2", "--lr", "0", "--times", str(times))
    found = ranks_of("reducer", tmp_path, "--compression", "fp16", *arguments, ranks=ranks, start_with="gloo")
    exact = one_rank(*arguments)["gradients"]
    for rank in found:
        error = (rank["gradients"] - exact).abs()
        # Each rank's gradient and each partial sum is rounded, with a relative error of up to 2^-11; the
        # gradient of one rank may be larger than the sum.
        assert error.max() < (2 * ranks - 1) * 2**-11 * exact.abs().max()
        assert error.median() < 2**-11 * exact.abs().median() * ranks
    assert all(torch.equal(found[0]["weights"], rank["weights"]) for rank in found)
    assert error.max() > 2**-14 * exact.abs().max(), "there is no rounding error of fp16: it was not used"


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_all_ranks_skip_a_step_that_overflows_on_one(tmp_path, compression):
    arguments = ("--overflow-on", "1", "--compression", compression)
    for rank in ranks_of("reducer", tmp_path, *arguments, ranks=2, start_with="gloo"):
        assert not rank["gradients"].isfinite().all()
        assert rank["moved"] == 0.0
        assert rank["scale"] == 512.0
    for rank in ranks_of("reducer", tmp_path, ranks=2, start_with="gloo"):
        assert rank["moved"] > 0.0  # without an overflow the same step changes the weights


def test_three_ranks_have_equal_weights_after_several_steps(tmp_path):
    first, *others = ranks_of("reducer", tmp_path, "--steps", "4", ranks=3, start_with="gloo")
    assert all(torch.equal(first["weights"], other["weights"]) for other in others)
