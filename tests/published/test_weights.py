"""Weights in files: what the published loading makes of one, and ours; and what both begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_volo.models.build import build_model
from horovod_volo.models.weights import load_weights, read_weights
from tests.published.checkouts import Published, named_folder
from tests.unit.network_samples import perturbed

named_folder()  # or this module is skipped

NETWORKS = pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
# A few classes are enough: the published training compares their number with that in the file.
FEW = 10


def saved(published: Published, name: str, path: Path, *, classes: int, form: str) -> Path:
    """Save a published network for 224 pixels in a form that the published training reads."""
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
    published: Published,
    name: str,
    file: Path,
    *,
    img_size: int,
    classes: int,
    module: str = "weights",
    use_ema: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return what a network of ours held before, what it holds after loading, and what the published does."""
    torch.manual_seed(5)
    ours = build_model(name, img_size=img_size, num_classes=classes, drop_path=0.0)
    theirs = published.network(name, img_size=img_size, num_classes=classes)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    fresh = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
    load_weights(ours, name, read_weights(str(file), use_ema=use_ema).tensors, str(file))
    getattr(published, module).load_pretrained_weights(
        theirs, str(file), use_ema=use_ema, strict=False, num_classes=classes
    )
    return fresh, ours.state_dict(), theirs.state_dict()


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Require the same tensors, to the bit but for the resized position embedding."""
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key]) and key != "pos_embed"] == []
    torch.testing.assert_close(ours["pos_embed"], theirs["pos_embed"], rtol=0.0, atol=1e-7)


@NETWORKS
@pytest.mark.parametrize(
    ("form", "use_ema"), [("plain", False), ("checkpoint", False), ("averaged", False), ("averaged", True)]
)
def test_the_same_classes(published: Published, tmp_path: Path, name: str, form: str, use_ema: bool) -> None:
    file = saved(published, name, tmp_path / "weights.pth", classes=FEW, form=form)
    fresh, ours, theirs = loaded(published, name, file, img_size=224, classes=FEW, use_ema=use_ema)
    assert_equal(ours, theirs)
    assert torch.equal(ours["pos_embed"], theirs["pos_embed"])  # nothing was resized
    assert not any(torch.equal(ours[key], fresh[key]) for key in ours if key.startswith(("head", "aux")))


@NETWORKS
@pytest.mark.parametrize("img_size", [384, 160], ids="{}px".format)
def test_another_size(published: Published, tmp_path: Path, name: str, img_size: int) -> None:
    file = saved(published, name, tmp_path / "weights.pth", classes=FEW, form="checkpoint")
    fresh, ours, theirs = loaded(published, name, file, img_size=img_size, classes=FEW)
    assert ours["pos_embed"].shape == fresh["pos_embed"].shape
    assert_equal(ours, theirs)


@pytest.mark.parametrize("module", ["weights", "volo_weights"])
@NETWORKS
def test_another_size_and_other_classes(published: Published, tmp_path: Path, name: str, module: str) -> None:
    file = saved(published, name, tmp_path / "weights.pth", classes=1000, form="checkpoint")
    fresh, ours, theirs = loaded(published, name, file, img_size=384, classes=FEW, module=module)
    assert_equal(ours, theirs)
    heads = {key for key in ours if key.startswith(("head", "aux_head"))}
    assert len(heads) == 4
    assert heads <= {key for key in ours if torch.equal(ours[key], fresh[key])}  # they begin anew


@NETWORKS
def test_fresh_weights_are_drawn_alike(published: Published, name: str) -> None:
    """Both draw from the same distributions, though not in the same order."""
    torch.manual_seed(6)
    ours = build_model(name, img_size=224, num_classes=FEW, drop_path=0.0).state_dict()
    torch.manual_seed(7)
    theirs = published.network(name, num_classes=FEW).state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        if theirs[key].unique().numel() == 1:
            assert torch.equal(ours[key], theirs[key]), key
            continue
        own, other = (without_the_limits(state[key]) for state in (ours, theirs))
        deviation, count = other.std().item(), len(other)
        # Six standard errors of a difference: sqrt(2 / count) deviations of means,
        # 1 / sqrt(count) of deviations.
        assert (own.mean() - other.mean()).abs() < 6 * deviation * (2 / count) ** 0.5, key
        assert own.std().item() == pytest.approx(deviation, rel=6 * count**-0.5), key


def without_the_limits(weights: Tensor) -> Tensor:
    """Leave out weights at the limits of timm's truncated normal distribution.

    About one in 2**25 is drawn as an infinity and lands there, a hundred deviations away.
    """
    return weights[weights.abs() < 2.0].double()
