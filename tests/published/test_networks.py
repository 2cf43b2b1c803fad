"""Networks, the weights that both load, and initial weights, against the published code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_volo.models.build import build_model
from horovod_volo.models.weights import load_weights, read_weights
from tests.published.checkouts import PublishedCode
from tests.published.conftest import compare
from tests.published.pairs import BOX, NAMES, box_on, compare_training, pair_of
from tests.unit import test_models_published_figures as figures
from tests.unit.network_samples import perturbed, random_images

NETWORKS = pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
# Few classes suffice: the published training only compares their number with that in the file.
FEW = 10


def saved(published: PublishedCode, name: str, path: Path, *, classes: int, form: str) -> Path:
    """Save a published network for 224 pixels in a format that the published training reads."""
    model = perturbed(published.network(name, num_classes=classes))
    state: dict[str, Any] = dict(model.state_dict())
    if form != "plain":
        state = {f"module.{key}": tensor for key, tensor in state.items()}
    if form == "averaged":
        state = {"state_dict": {key: 2 * tensor for key, tensor in state.items()}, "state_dict_ema": state}
    elif form == "checkpoint":
        state = {"epoch": 3, "state_dict": state}
    torch.save(state, path)
    return path


def loaded(
    published: PublishedCode, name: str, file: Path, *, img_size: int, classes: int, use_ema: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of our network before and after loading, and those of the published one after it."""
    torch.manual_seed(5)
    ours = build_model(name, img_size=img_size, num_classes=classes, drop_path=0.0)
    theirs = published.network(name, img_size=img_size, num_classes=classes)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    initial = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
    load_weights(ours, name, read_weights(str(file), use_ema=use_ema).tensors, str(file))
    published.weights.load_pretrained_weights(
        theirs, str(file), use_ema=use_ema, strict=False, num_classes=classes
    )
    return initial, ours.state_dict(), theirs.state_dict()


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Require bit-identical tensors, and nearly equal position embeddings, which are resized."""
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key]) and key != "pos_embed"] == []
    torch.testing.assert_close(ours["pos_embed"], theirs["pos_embed"], rtol=0.0, atol=1e-7)


@NETWORKS
@pytest.mark.parametrize(
    ("form", "use_ema", "img_size", "classes"),
    [
        ("plain", False, 224, FEW),
        ("checkpoint", False, 224, FEW),
        ("averaged", False, 224, FEW),
        ("averaged", True, 224, FEW),
        ("checkpoint", False, 384, FEW),
        ("checkpoint", False, 160, FEW),
        ("checkpoint", False, 384, 1000),
    ],
)
def test_loaded_weights(published, tmp_path, name, form, use_ema, img_size, classes):
    """Of each format, with the embedding resized for other image sizes, and with heads of other classes."""
    file = saved(published, name, tmp_path / "weights.pth", classes=classes, form=form)
    initial, ours, theirs = loaded(published, name, file, img_size=img_size, classes=FEW, use_ema=use_ema)
    assert_equal(ours, theirs)
    assert ours["pos_embed"].shape == initial["pos_embed"].shape
    if img_size == 224:
        assert torch.equal(ours["pos_embed"], theirs["pos_embed"])  # the embedding was not resized
    heads = [key for key in ours if key.startswith(("head", "aux_head"))]
    assert len(heads) == 4
    # Heads for other classes keep their initial weights.
    assert all(torch.equal(ours[key], initial[key]) == (classes != FEW) for key in heads)


@NETWORKS
def test_initial_weights_have_the_same_distributions(published: PublishedCode, name: str) -> None:
    """Both draw from the same distributions, but in another order."""
    torch.manual_seed(6)
    ours = build_model(name, img_size=224, num_classes=FEW, drop_path=0.0).state_dict()
    torch.manual_seed(7)
    theirs = published.network(name, num_classes=FEW).state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        if theirs[key].unique().numel() == 1:
            assert torch.equal(ours[key], theirs[key]), key
            continue
        # timm's truncated normal draws one in 2**25 as an infinity, clamped to a limit 100 deviations away.
        own, other = (state[key][state[key].abs() < 2.0].double() for state in (ours, theirs))
        deviation, count = other.std().item(), len(other)
        # Six standard errors, which are sqrt(2 / count) standard deviations for the difference of two means,
        # and 1 / sqrt(count) for that of two standard deviations.
        assert (own.mean() - other.mean()).abs() < 6 * deviation * (2 / count) ** 0.5, key
        assert own.std().item() == pytest.approx(deviation, rel=6 * count**-0.5), key


@pytest.mark.parametrize("name", NAMES)
def test_a_network(name: str, published: PublishedCode) -> None:
    """Names and shapes, logits of evaluation, rates of drop path, and from images to gradients."""
    pair = pair_of(published, name, drop_path=0.3)
    ours, theirs = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (pair.ours, pair.theirs)
    )
    assert ours == theirs
    named = [{name for name, _ in model.named_parameters()} for model in (pair.ours, pair.theirs)]
    assert named[0] == named[1]
    assert pair.ours.no_weight_decay() == pair.theirs.no_weight_decay()
    with torch.inference_mode():
        images = random_images(2, 224)
        compare(f"{name}, evaluation", pair.ours.eval()(images), pair.theirs.eval()(images))
    compare_training(published, pair, 2, BOX)


@pytest.mark.parametrize(
    ("name", "batch", "side"),
    [("volo_d1", 2, 384), ("lvvit_s", 2, 384), ("volo_d1", 3, 224), ("lvvit_t", 3, 224)],
)
def test_384_pixels_and_odd_batches(name: str, batch: int, side: int, published: PublishedCode) -> None:
    """The middle image of an odd batch is its own MixToken partner."""
    pair, images = pair_of(published, name, img_size=side), random_images(batch, side)
    with torch.inference_mode():
        evaluated = pair.ours.eval()(images)
        compare(f"{name}, evaluation at {side} px", evaluated, pair.theirs.eval()(images))
    compare_training(published, pair, batch, box_on(side // 16), img_size=side)


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_drop_path(name: str, published: PublishedCode) -> None:
    """Ours computes a branch only for the images that keep it, the published code for all of them."""
    pair = pair_of(published, name, img_size=64, drop_path=0.9)
    counts = {len(rows) for _, rows in compare_training(published, pair, 3, box_on(4), img_size=64)}
    assert 0 in counts  # a branch that no image keeps
    assert len(counts) > 2


@pytest.mark.parametrize("name", figures.FIGURES)
@torch.inference_mode()
def test_the_recorded_figures_are_of_the_published_networks(name: str, published: PublishedCode) -> None:
    """Those that the unit tests compare our networks with; a failure shows them anew."""
    model = published.network(name)
    figures.fill(model)
    images = figures.images(2, 224)
    with published.fixed_box(name, figures.BOX):
        found = {"evaluation": figures.summary(model.eval()(images))}
        class_logits, token_logits, _ = model.train()(images)
    found |= {"class": figures.summary(class_logits), "tokens": figures.summary(token_logits)}
    recorded = figures.FIGURES[name].items()
    assert found == {what: pytest.approx(values, abs=1e-4) for what, values in recorded}
