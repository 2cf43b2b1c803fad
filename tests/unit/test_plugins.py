"""Plugins that cannot be imported, or register what is there already, are refused in one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from horovod_volo.config.schema import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.models import registry
from horovod_volo.models.build import build_model, check_model, tokens_per_side, training_forward
from horovod_volo.objective import loss
from horovod_volo.optim import build
from horovod_volo.plugins import ModelSpec, load_plugins, register_loss, register_model, register_optimizer


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test tables of its own, so that nothing stays registered."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    monkeypatch.setattr(loss, "_LOSSES", dict(loss._LOSSES))
    monkeypatch.setattr(build, "_OPTIMIZERS", dict(build._OPTIMIZERS))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


MODEL = """
from torch import nn
from horovod_volo.plugins import ModelSpec, register_model
def build(*, img_size, num_classes, drop_path, aux_head):
    return nn.Linear(3, num_classes)
register_model(ModelSpec(name={name!r}, build=build))
"""


def refusal(modules: str) -> str:
    with pytest.raises(UserError) as raised:
        load_plugins(modules)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_modules_are_imported_in_their_order(folder: Path) -> None:
    for name in ("first", "second"):
        (folder / f"{name}_plugin.py").write_text(MODEL.format(name=name))
    load_plugins("second_plugin, first_plugin,")
    assert registry.registered_models()[-2:] == ("second", "first")
    assert isinstance(build_model("first", img_size=33, num_classes=7, drop_path=0.0), nn.Linear)


def test_an_installed_entry_point_is_imported_without_a_flag(folder: Path) -> None:
    (folder / "installed_plugin.py").write_text(MODEL.format(name="installed"))
    info = folder / "some_distribution-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-distribution\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[horovod_volo.plugins]\nmine = installed_plugin\n")
    load_plugins("")
    assert "installed" in registry.registered_models()
    (info / "entry_points.txt").write_text("[horovod_volo.plugins]\nmine = gone_plugin\n")
    assert "The installed plugin mine (gone_plugin): there is no module 'gone_plugin'." in refusal("")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import nothing_like_this",
            "failed while it was imported: ModuleNotFoundError: No module named 'nothing",
        ),
        ("x = 1\nraise ValueError('two\\nlines')", "ValueError: two lines ("),
        ("x = (", "SyntaxError: '(' was never closed"),
        (
            MODEL.format(name="volo_d1"),
            "There is a model 'volo_d1' already. Register yours under another name.",
        ),
    ],
)
def test_a_module_that_raises_is_one_message(source: str, said: str, folder: Path) -> None:
    (folder / "bad_plugin.py").write_text(source)
    text = refusal("bad_plugin")
    assert text.startswith("--plugin bad_plugin")
    assert said in text
    assert "two" not in text or "bad_plugin.py, line 2)" in text


@pytest.mark.parametrize(("module", "missing"), [("gone", "gone"), ("gone.inside", "gone")])
def test_a_module_that_is_not_there(module: str, missing: str) -> None:
    assert f"--plugin {module}: there is no module {missing!r}. Install it on every host" in refusal(module)


def test_names_that_exist_are_not_replaced() -> None:
    with pytest.raises(UserError, match="There is a loss 'soft-target' already"):
        register_loss("soft-target", lambda *_: loss.build_loss(Objective(), 2, 1))
    with pytest.raises(UserError, match="There is an optimizer 'sgd' already"):
        register_optimizer("sgd", torch.optim.SGD, state_keys=())


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"There is no loss 'soft-tagret'. Did you mean soft-target\?"):
        loss.check_loss("soft-tagret")
    with pytest.raises(
        UserError, match=r"There is no optimizer 'adamv'. Did you mean adamw\? --opt takes adamw, "
    ):
        build.check_optimizer("adamv", sharded=False)


def test_only_a_shardable_optimizer_is_sharded() -> None:
    register_optimizer("whole", torch.optim.SGD, state_keys=())
    register_optimizer("cut", torch.optim.SGD, state_keys=(), shardable=True)
    build.check_optimizer("cut", sharded=True)
    build.check_optimizer("whole", sharded=False)
    with pytest.raises(
        UserError, match=r"--opt whole needs them whole. Use --opt adamw or sgd or cut, or drop"
    ):
        build.check_optimizer("whole", sharded=True)


class Patches(nn.Module):
    """A model with a token per 8 x 8 pixels, without blocks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 8, stride=8)
        self.head, self.aux_head = nn.Linear(4, num_classes), nn.Linear(4, num_classes)

    def training_logits(self, images, exchange, *_):
        tokens = exchange(self.patch_embed(images).permute(0, 2, 3, 1))
        return self.head(tokens.mean((1, 2))), self.aux_head(exchange(tokens)).flatten(1, 2)

    def class_logits(self, images, exchange, *_):
        raise AssertionError("it has an auxiliary head")


def test_a_model_with_tokens_states_its_stride() -> None:
    def build_patches(*, img_size: int, num_classes: int, drop_path: float, aux_head: bool) -> nn.Module:
        return Patches(num_classes)

    register_model(ModelSpec("patches", build_patches, stride=8))
    assert tokens_per_side("patches", 40) == 5
    check_model("patches", img_size=40, tokens=True)
    with pytest.raises(UserError, match=r"must be a multiple of 8 for patches, not 44. The nearest is"):
        check_model("patches", img_size=44, tokens=True)
    model = build_model("patches", img_size=40, num_classes=3, drop_path=0.0)
    class_logits, token_logits = training_forward(model)(torch.zeros(2, 3, 40, 40), lambda tokens: tokens, 0)
    assert (class_logits.shape, token_logits.shape) == ((2, 3), (2, 25, 3))
