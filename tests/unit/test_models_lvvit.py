"""LV-ViT: the published sizes, names, initial weights and formulas. For its training see test_models_volo."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.models.lvvit import LVVIT_SIZES, LvVit, LvVitBlock

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


@pytest.mark.parametrize(
    ("name", "img_size", "parameters"),
    [
        ("lvvit_t", 224, 8_534_720),
        ("lvvit_s", 224, 26_151_824),
        ("lvvit_m", 224, 55_830_544),
        ("lvvit_l", 224, 150_021_968),
        ("lvvit_s", 384, 26_297_744),
        ("lvvit_l", 448, 150_473_552),
    ],
)
def test_the_networks_have_the_published_size(name: str, img_size: int, parameters: int) -> None:
    model = on_meta(name, img_size=img_size)
    assert sum(map(Tensor.numel, model.parameters())) == parameters


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


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_a_block_is_the_published_formula(divisor: float) -> None:
    torch.manual_seed(3)
    block = LvVitBlock(12, 3, 3.0, divisor).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 12, dtype=torch.float64)

    def normed(values: Tensor, norm: nn.LayerNorm) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    joint = normed(x, block.norm1) @ block.attn.qkv.weight.T  # queries, keys and values, concatenated
    heads = []
    for head in range(3):
        q, k, v = (joint[..., part + 4 * head : part + 4 * head + 4] for part in (0, 12, 24))
        heads.append(((q @ k.transpose(1, 2)) / 4**0.5).softmax(-1) @ v)
    x_attended = x + (torch.cat(heads, -1) @ block.attn.proj.weight.T + block.attn.proj.bias) / divisor
    hidden = normed(x_attended, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    expected = x_attended + (hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias) / divisor
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


def test_stochastic_depth_rises_over_all_blocks() -> None:
    model = on_meta("lvvit_s", drop_path=0.3)
    assert model.rates == pytest.approx([0.02 * n for n in range(16)])
