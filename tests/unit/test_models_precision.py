"""bf16 equals fp32 up to rounding, also on CPUs whose own bf16 convolution is wrong."""

import copy

import pytest
import torch
from torch import nn

from horovod_volo.models.build import build_model
from horovod_volo.models.precision import autocast, precision_warnings, prepare_precision

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
    names = list(model.state_dict())
    for precision, fixed in (("fp32", False), ("bf16", True)):
        prepare_precision(model, precision, CPU)
        assert (type(model.patch_embed.proj) is not nn.Conv2d) == fixed
    assert list(model.state_dict()) == names
    for each in (model, copy.deepcopy(model)):
        assert error_of_the_stem(each) < 0.02


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_only_tf32_lets_cuda_round_fp32(name: str) -> None:
    prepare_precision(nn.Identity(), "fp32" if name == "tf32" else "tf32", CPU)
    prepare_precision(nn.Identity(), name, CPU)
    found = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    prepare_precision(nn.Identity(), "fp32", CPU)
    assert found == (name == "tf32", name == "tf32")


def test_tf32_is_fp32_on_a_cpu() -> None:
    model = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0).eval()
    images = torch.randn(2, 3, 64, 64)
    prepare_precision(model, "tf32", CPU)
    with torch.no_grad(), autocast("tf32", CPU):
        found = model(images)
    prepare_precision(model, "fp32", CPU)
    with torch.no_grad():
        assert torch.equal(found, model(images))
    assert precision_warnings("tf32", CPU) == ["a CPU computes --precision tf32 in fp32"]
