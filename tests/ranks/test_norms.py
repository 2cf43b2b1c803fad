"""Batch norm over ranks: several ranks with a part of a batch each equal one rank with the whole batch."""

import pytest
import torch
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of, train

# The neck's first and second norms; pooling with laterals and auxiliary head, bottleneck, pyramid, fusion.
ROUNDS = 6


@pytest.mark.parametrize(
    ("images", "norms", "start_with"),
    [((3, 3), "heads", "gloo"), ((4, 2), "heads", "mpi"), ((1, 2, 3), "all", "gloo")],
)
def test_ranks_equal_one(tmp_path, images, norms, start_with):
    # VOLO's stem has norms of its own, which take one rank's images unless all are connected.
    arguments = ("--norms", "all", "--images") if norms == "all" else ("--images",)
    found = ranks_of(
        "norms", tmp_path, *arguments, *map(str, images), ranks=len(images), start_with=start_with
    )
    (alone,) = ranks_of("norms", tmp_path / "1", *arguments, str(sum(images)), ranks=1, start_with="none")
    if norms == "all":
        compare(found, alone, images)
        assert found[0]["exchanges"] == 2 * (ROUNDS + 3)  # the stem's three follow each other
    else:
        assert found[0]["norms"] == 19
        assert found[0]["exchanges"] == 2 * ROUNDS
        assert not torch.allclose(found[0]["logits"], alone["logits"][: images[0]], atol=1e-6)


def test_a_repeated_forward_exchanges_nothing(tmp_path):
    images = ("--recomputed", "--images")
    found = ranks_of("norms", tmp_path, *images, "4", "1", ranks=2, start_with="gloo")
    (alone,) = ranks_of("norms", tmp_path / "1", *images, "5", ranks=1, start_with="none")
    compare(found, alone, (4, 1))
    assert found[0]["exchanges"] == 2 * 2


def compare(found, alone, images):
    assert alone["gradients"].abs().max() > 1e-2
    begin = 0
    for rank, count in zip(found, images, strict=True):
        own = slice(begin, begin + count)
        assert torch.allclose(rank["logits"], alone["logits"][own], rtol=0, atol=1e-9)
        assert torch.allclose(rank["inputs"], alone["inputs"][own], rtol=0, atol=1e-9)
        assert torch.allclose(rank["gradients"], alone["gradients"], rtol=0, atol=1e-9)
        assert torch.allclose(rank["statistics"], alone["statistics"], rtol=0, atol=1e-6)
        begin += count


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=10)
    return folder


def trained(images, output, *flags, ranks):
    """Train for five steps on eight images each; return the weights."""
    small = (
        "--recipe",
        "demo",
        "--img-size",
        "32",
        "--epochs",
        "1",
        "--warmup-epochs",
        "0",
        "--drop-path",
        "0",
    )
    batch = ("--batch-size", str(8 // ranks), "--output", str(output), "--name", "run", *flags)
    done = train(str(images), *small, *batch, ranks=ranks, start_with="gloo" if ranks > 1 else "none")
    assert done.returncode == 0, done.stdout
    weights = load_file(output / "run" / "checkpoints" / "last" / "model.safetensors")
    return torch.cat([tensor.double().flatten() for tensor in weights.values()])


def test_classification_on_two_ranks_is_that_on_one(images, tmp_path):
    alone = trained(images, tmp_path / "1", "--sync-bn", "all", ranks=1)
    both = trained(images, tmp_path / "2", "--sync-bn", "all", ranks=2)
    apart = trained(images, tmp_path / "3", ranks=2)
    assert (both - alone).abs().mean() < 0.02 * (apart - alone).abs().mean()


def test_classification_has_no_heads_to_synchronise(images, tmp_path):
    done = train(str(images), "--recipe", "demo", "--sync-bn", "heads", ranks=1, start_with="none")
    assert done.returncode == 2
    assert "--sync-bn heads is for segmentation" in done.stdout
