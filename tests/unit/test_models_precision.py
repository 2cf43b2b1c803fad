"""bf16 equals fp32 up to rounding, also on CPUs whose own bf16 convolution is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from horovod_volo.models import precision
from horovod_volo.models.build import build_model
from horovod_volo.models.precision import autocast, fix_convolutions, precision_warnings, set_tf32

CPU = torch.device("cpu")


def error_of_the_stem(model: nn.Module) -> float:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model.patch_embed(images)
        with autocast("bf16", CPU):
            lower = model.patch_embed(images).float()
    return float((lower - exact).norm() / exact.norm())


def test_the_stem_of_volo_demo_is_correct_in_bf16() -> None:
    model = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0).eval()
    before = error_of_the_stem(model)
    warnings = fix_convolutions(model, "bf16", CPU)
    assert error_of_the_stem(model) < 0.02
    assert bool(warnings) == (before > 0.1)
    assert all("patch_embed.proj" in warning for warning in warnings)


def test_a_wrong_convolution_is_detected_and_computed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.Conv2d._conv_forward

    def wrong_for_stride_4(self, images, weight, bias):  # type: ignore[no-untyped-def]
        result = right(self, images, weight, bias)
        return -result if self.stride == (4, 4) and images.dtype == torch.bfloat16 else result

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", wrong_for_stride_4)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 4, stride=4), nn.Conv2d(8, 8, 4, stride=4))
    names = list(network.state_dict())
    (warning,) = fix_convolutions(network, "bf16", CPU)
    assert "computes 1, 2 wrongly in bf16" in warning
    assert list(network.state_dict()) == names
    for fixed in (network, copy.deepcopy(network)):
        images = torch.randn(2, 3, 34, 34)
        with torch.no_grad():
            exact = fixed(images)
            with autocast("bf16", CPU):
                lower = fixed(images).float()
        assert (lower - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_correct_convolutions_are_left_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_is_wrong", lambda *_: name == "fp32")
    network = nn.Sequential(nn.Conv2d(3, 8, 3))
    assert fix_convolutions(network, name, CPU) == []
    assert type(network[0]) is nn.Conv2d


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_only_tf32_lets_cuda_round_fp32(name: str) -> None:
    set_tf32("fp32" if name == "tf32" else "tf32")
    set_tf32(name)
    found = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    set_tf32("fp32")
    assert found == (name == "tf32", name == "tf32")


def test_tf32_is_fp32_on_a_cpu() -> None:
    model = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0).eval()
    images = torch.randn(2, 3, 64, 64)
    set_tf32("tf32")
    assert fix_convolutions(model, "tf32", CPU) == []
    with torch.no_grad(), autocast("tf32", CPU):
        found = model(images)
    set_tf32("fp32")
    with torch.no_grad():
        assert torch.equal(found, model(images))
    assert precision_warnings("tf32", CPU) == ["a CPU computes --precision tf32 in fp32"]
