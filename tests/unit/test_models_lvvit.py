"""LV-ViT: the published names and initial weights. For size and training see test_models_volo, for formulas
test_models_published_figures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.models.lvvit import LVVIT_SIZES, LvVit

DEMO: dict[str, Any] = {
    "layers": 3,
    "embed_dim": 48,
    "num_heads": 4,
    "stem_width": 8,
    "residual_divisor": 2.0,
}


def on_meta(name: str, *, img_size: int = 224, drop_path: float = 0.0) -> LvVit:
    """Build a network without the memory for its weights."""
    with torch.device("meta"):
        return LvVit(img_size=img_size, num_classes=1000, drop_path=drop_path, **LVVIT_SIZES[name])


def test_weights_have_the_published_names_and_shapes() -> None:
    linear = {"attn.proj": (240, 240), "mlp.fc1": (720, 240), "mlp.fc2": (240, 720)}
    expected = {"cls_token": (1, 1, 240), "pos_embed": (1, 197, 240)}
    expected |= {"patch_embed.conv1.weight": (64, 3, 7, 7), "patch_embed.proj.weight": (240, 64, 8, 8)}
    expected |= {f"patch_embed.conv{number}.weight": (64, 64, 3, 3) for number in (2, 3)}
    for number, part in itertools.product((1, 2, 3), ("weight", "bias", "running_mean", "running_var")):
        expected[f"patch_embed.bn{number}.{part}"] = (64,)
        expected[f"patch_embed.bn{number}.num_batches_tracked"] = ()
    for block in (f"blocks.{number}" for number in range(12)):
        expected[f"{block}.attn.qkv.weight"] = (720, 240)
        expected |= {f"{block}.{name}.weight": shape for name, shape in linear.items()}
        expected |= {f"{block}.{name}.bias": shape[:1] for name, shape in linear.items()}
        expected |= {f"{block}.norm{n}.{part}": (240,) for n in (1, 2) for part in ("weight", "bias")}
    expected |= {"patch_embed.proj.bias": (240,), "norm.weight": (240,), "norm.bias": (240,)}
    expected |= {f"{head}.weight": (1000, 240) for head in ("head", "aux_head")}
    expected |= {f"{head}.bias": (1000,) for head in ("head", "aux_head")}
    assert {name: tuple(value.shape) for name, value in on_meta("lvvit_t").state_dict().items()} == expected


def test_initial_weights_have_the_published_distributions() -> None:
    torch.manual_seed(0)
    model = LvVit(img_size=64, num_classes=10, drop_path=0.0, **DEMO | {"embed_dim": 192})
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 3 * 4 + 2
    drawn = torch.cat([module.weight.flatten() for module in linear])
    assert drawn.std().item() == pytest.approx(0.02, rel=0.01)
    assert drawn.abs().max() > 0.08  # normal, not truncated
    assert all(not module.bias.any() for module in linear if module.bias is not None)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
    bound = (3 * 7 * 7) ** -0.5  # torch's uniform initialization of convolutions
    assert 0.95 * bound < model.patch_embed.conv1.weight.abs().max() <= bound
    assert model.patch_embed.conv1.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_stochastic_depth_rises_over_all_blocks() -> None:
    model = on_meta("lvvit_s", drop_path=0.3)
    assert model.rates == pytest.approx([0.02 * n for n in range(16)])
