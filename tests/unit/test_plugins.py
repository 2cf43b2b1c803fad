"""Plugins that cannot be imported, or register an existing name, are refused with one message."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.engine.callbacks import build_plugin_callbacks
from horovod_volo.models.build import build_model, check_model, tokens_per_side, training_forward
from horovod_volo.models.registry import MODELS
from horovod_volo.objective.loss import LOSSES, build_loss
from horovod_volo.optim.build import OPTIMIZERS, check_optimizer
from horovod_volo.optim.schedule import SCHEDULES
from horovod_volo.plugins import ModelSpec, load_plugins, register_loss, register_model, register_optimizer

REGISTRIES: list[Registry[Any]] = [MODELS, LOSSES, OPTIMIZERS, SCHEDULES]


@pytest.fixture(autouse=True)
def same_registries_after_the_test() -> Iterator[None]:
    """Remove what a test registers."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose modules can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


MODEL = """
from collections import OrderedDict
from torch import nn
from horovod_volo.plugins import ModelSpec, register_model
def build(*, img_size, num_classes, drop_path, aux_head):
    parts = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(3, num_classes))
    return nn.Sequential(parts)
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
    # Those of extras that no test has imported yet are listed last.
    assert [name for name in MODELS.names() if name in ("first", "second")] == ["second", "first"]
    assert isinstance(build_model("first", img_size=33, num_classes=7, drop_path=0.0), nn.Sequential)


def test_an_installed_entry_point_is_imported_without_a_flag(folder: Path) -> None:
    (folder / "installed_plugin.py").write_text(MODEL.format(name="installed"))
    info = folder / "some_distribution-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-distribution\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[horovod_volo.plugins]\nmine = installed_plugin\n")
    load_plugins("")
    assert "installed" in MODELS.names()
    (info / "entry_points.txt").write_text("[horovod_volo.plugins]\nmine = gone_plugin\n")
    assert "The installed plugin mine (gone_plugin): there is no module 'gone_plugin'." in refusal("")
    assert "there is no module 'gone'" in refusal("gone.inside")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing"),
        ("x = 1\nraise ValueError('two\\nlines')", "ValueError: two lines ("),
        ("x = (", "SyntaxError: '(' was never closed"),
        (None, "there is no module 'bad_plugin'. Install it on every host"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_message(source, message, folder):
    if source is not None:
        (folder / "bad_plugin.py").write_text(source)
    text = refusal("bad_plugin")
    assert text.startswith("--plugin bad_plugin")
    assert message in text
    assert "two" not in text or "bad_plugin.py, line 2)" in text


def test_existing_names_are_not_replaced_and_of_unknown_ones_the_nearest_is_named() -> None:
    with pytest.raises(UserError, match="The loss 'soft-target' exists already"):
        register_loss("soft-target", lambda *_: build_loss(Objective(), 2, 1))
    with pytest.raises(UserError, match="The optimizer 'sgd' exists already"):
        register_optimizer("sgd", torch.optim.SGD, state_keys=())
    with pytest.raises(UserError, match=r"Did you mean soft-target\?"):
        LOSSES.find("soft-tagret")
    with pytest.raises(UserError, match=r"Did you mean adamw\? --opt takes adamw, "):
        check_optimizer("adamv", sharded=False)


def test_only_a_shardable_optimizer_is_sharded() -> None:
    register_optimizer("whole", torch.optim.SGD, state_keys=())
    register_optimizer("cut", torch.optim.SGD, state_keys=(), shardable=True)
    check_optimizer("cut", sharded=True)
    check_optimizer("whole", sharded=False)
    with pytest.raises(UserError, match=r"Use --opt adamw or sgd or cut, or drop"):
        check_optimizer("whole", sharded=True)


class PatchModel(nn.Module):
    """A model with one token for each 8 x 8 pixels, without blocks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 8, stride=8)
        self.head, self.aux_head = nn.Linear(4, num_classes), nn.Linear(4, num_classes)

    def training_logits(self, images, swap_tokens, *_):
        tokens = swap_tokens(self.patch_embed(images).permute(0, 2, 3, 1))
        return self.head(tokens.mean((1, 2))), self.aux_head(swap_tokens(tokens)).flatten(1, 2)

    def class_logits(self, images, swap_tokens, *_):
        raise AssertionError("it has an auxiliary head")


def test_a_model_with_tokens_has_a_stride() -> None:
    def build_patches(*, img_size: int, num_classes: int, drop_path: float, aux_head: bool) -> nn.Module:
        return PatchModel(num_classes)

    register_model(ModelSpec("patches", build_patches, stride=8))
    assert tokens_per_side("patches", 40) == 5
    check_model("patches", img_size=40, tokens=True)
    with pytest.raises(UserError, match=r"must be a multiple of 8 for patches, not 44. The nearest is"):
        check_model("patches", img_size=44, tokens=True)
    model = build_model("patches", img_size=40, num_classes=3, drop_path=0.0)
    class_logits, token_logits = training_forward(model)(torch.zeros(2, 3, 40, 40), lambda tokens: tokens, 0)
    assert (class_logits.shape, token_logits.shape) == ((2, 3), (2, 25, 3))


CALLBACK = """
from horovod_volo import Callback
from horovod_volo.plugins import register_callback

@register_callback
class {name}({base}):
    def __init__(self):
        {body}
"""


def test_callbacks_are_built_for_the_runs_of_their_plugin(folder: Path) -> None:
    for name in ("one", "two"):
        package = folder / f"package_{name}"
        package.mkdir()
        (package / "__init__.py").write_text(f"from package_{name} import inner")
        source = CALLBACK.format(name=name.title(), base="Callback", body="pass")
        (package / "inner.py").write_text(source)
    load_plugins("package_one,package_two")
    load_plugins("package_one")
    built = [build_plugin_callbacks(modules) for modules in ("", "package_one", "package_two, package_one")]
    assert [[type(each).__name__ for each in found] for found in built] == [[], ["One"], ["One", "Two"]]
    assert build_plugin_callbacks("package_one")[0] is not built[1][0]


@pytest.mark.parametrize(
    ("base", "body", "message"),
    [
        ("object", "pass", "registered Broken, which is no callback"),
        ("Callback", "1 / 0", "ZeroDivisionError: division by zero ("),
    ],
)
def test_a_callback_that_cannot_be_built_is_one_message(base, body, message, folder):
    plugin = f"broken_{base.lower()}_plugin"
    (folder / f"{plugin}.py").write_text(CALLBACK.format(name="Broken", base=base, body=body))
    load_plugins(plugin)
    with pytest.raises(UserError, match=re.escape(message)):
        build_plugin_callbacks(plugin)
