"""Loaded weights equal those that the published code loads, and initial weights have its distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_volo.models.build import build_model
from horovod_volo.models.weights import load_weights, read_weights
from tests.published.checkouts import PublishedCode
from tests.unit.network_samples import perturbed

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
    published: PublishedCode,
    name: str,
    file: Path,
    *,
    img_size: int,
    classes: int,
    use_ema: bool = False,
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
def test_loaded_weights(
    published: PublishedCode,
    tmp_path: Path,
    name: str,
    form: str,
    use_ema: bool,
    img_size: int,
    classes: int,
) -> None:
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
        own, other = (without_limits(state[key]) for state in (ours, theirs))
        deviation, count = other.std().item(), len(other)
        # Six standard errors, which are sqrt(2 / count) standard deviations for the difference of two means,
        # and 1 / sqrt(count) for that of two standard deviations.
        assert (own.mean() - other.mean()).abs() < 6 * deviation * (2 / count) ** 0.5, key
        assert own.std().item() == pytest.approx(deviation, rel=6 * count**-0.5), key


def without_limits(weights: Tensor) -> Tensor:
    """Leave out weights at the limits of timm's truncated normal distribution.

    About one in 2**25 is drawn as an infinity and clamped to a limit, a hundred standard deviations away.
    """
    return weights[weights.abs() < 2.0].double()
