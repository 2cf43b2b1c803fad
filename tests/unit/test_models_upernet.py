"""UperNet: published numbers of parameters, names of other projects, timm's maps, any size of image."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.errors import UserError
from horovod_volo.dense.backbones import build_backbone
from horovod_volo.dense.upernet import HEADS, UperNet, fitted_weights
from horovod_volo.models.build import build_model
from horovod_volo.models.sync_batch_norm import synchronize_norms
from horovod_volo.models.timm_api import create_model
from horovod_volo.models.weights import load_fitted


def build(
    name: str,
    img_size: int = 64,
    *,
    neck: Literal["lvvit", "pyramid"] = "lvvit",
    classes: int = 5,
    drop_path: float = 0.0,
) -> UperNet:
    model = Model(model=name, img_size=img_size, drop_path=drop_path)
    return UperNet(model, Segmentation(neck=neck, head_width=16, auxiliary_width=16), classes)


def test_the_heads_have_mmsegmentations_names() -> None:
    network = build("volo_demo")
    names = [name for name, _ in network.decode_head.named_parameters()]
    norm = ("conv.weight", "bn.weight", "bn.bias")
    units = [f"psp_modules.{number}.1" for number in range(4)]
    units += ["bottleneck", "fpn_bottleneck"]
    units += [f"{part}.{number}" for part in ("lateral_convs", "fpn_convs") for number in range(3)]
    expected = {f"{unit}.{part}" for unit in units for part in norm} | {"conv_seg.weight", "conv_seg.bias"}
    assert set(names) == expected
    assert len(names) == 38
    auxiliary = {name for name, _ in network.auxiliary_head.named_parameters()}
    assert auxiliary == {f"convs.0.{part}" for part in norm} | {"conv_seg.weight", "conv_seg.bias"}


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_gradients_reach_every_parameter(name: str) -> None:
    network = build(name, 64, neck="pyramid" if name == "volo_d1" else "lvvit").train()
    logits, auxiliary = network.training_logits(torch.randn(2, 3, 64, 64), 1)
    assert logits.shape == (2, 5, 16, 16)
    assert auxiliary.shape == (2, 5, 4, 4)
    (logits.square().mean() + auxiliary.square().mean()).backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


def test_volos_maps_are_timms() -> None:
    torch.manual_seed(0)
    theirs = create_model("volo_d1_224", features_only=True, out_indices=(0, 1, 2, 3)).eval()
    ours = build_backbone(Model(model="volo_d1")).eval()
    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[f"model.{name}"] for name in ours.state_dict()})
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        maps = zip(ours(images), theirs(images), strict=True)
        for mine, other in maps:
            their = other if other.shape[1] == mine.shape[1] else other.permute(0, 3, 1, 2)
            assert torch.allclose(mine, their, atol=1e-5)
    assert ours.strides == (8, 16, 16, 16)


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_another_size_resizes_the_position_embedding(name: str) -> None:
    """Images of another size give what a network built for them gives, with the same weights fitted to it."""
    torch.manual_seed(0)
    small, large = build(name, 64).eval(), build(name, 96).eval()
    weights, fresh, messages = fitted_weights(large, small.state_dict())
    load_fitted(large, weights, "here", heads=HEADS, fresh=fresh)
    assert any("position embedding resized" in message for message in messages)
    images = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.allclose(small(images), large(images), atol=1e-5)
        assert not torch.allclose(build(name, 96).eval()(images), large(images), atol=1e-3)
        assert small(images[:, :, :50, :85]).shape == (1, 5, 16, 24)  # sides need not be multiples of 16


def test_weights_of_classification_begin_the_backbone() -> None:
    trained = build_model("volo_demo", img_size=32, num_classes=7, drop_path=0.0)
    network = build("volo_demo")
    weights, fresh, messages = fitted_weights(network, trained.state_dict())
    before = network.decode_head.conv_seg.weight.clone()
    loaded = load_fitted(network, weights, "here", heads=HEADS, fresh=fresh)
    assert torch.equal(network.backbone.network[2][0].mlp.fc1.weight, trained.network[2][0].mlp.fc1.weight)  # type: ignore[union-attr,index]
    assert torch.equal(network.decode_head.conv_seg.weight, before)
    assert any("neck and heads begin with fresh weights" in message for message in messages)
    assert any("tensors of classification alone are left out" in message for message in messages)
    assert "tensors loaded" in loaded[0]


def test_weights_under_hugging_faces_names_load() -> None:
    torch.manual_seed(0)
    source, network = build("volo_demo"), build("volo_demo")
    theirs = {
        name.replace(".bn.", ".batch_norm.").replace("_head.conv_seg", "_head.classifier"): tensor
        for name, tensor in source.state_dict().items()
    }
    assert any("batch_norm" in name for name in theirs)
    weights, fresh, _ = fitted_weights(network, theirs)
    load_fitted(network, weights, "here", heads=HEADS, fresh=fresh)
    assert fresh == []
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
    # Those for other classes give all but the classifiers.
    other, fresh, _ = fitted_weights(network, build("volo_demo", classes=9).state_dict())
    messages = load_fitted(network, other, "here", heads=HEADS, fresh=fresh)
    assert "the weights are for 9 classes, the images have 5" in " ".join(messages)
    damaged = {name: tensor for name, tensor in weights.items() if "fpn_bottleneck" not in name}
    with pytest.raises(UserError, match="parameters 6 missing"):
        load_fitted(network, damaged, "here", heads=HEADS)


def test_a_network_of_timm_with_four_strides_needs_no_neck() -> None:
    network = build("resnet18").eval()
    assert network.backbone.strides == (4, 8, 16, 32)
    assert list(network.neck.parameters()) == []
    assert network(torch.zeros(1, 3, 64, 96)).shape == (1, 5, 16, 24)
    synchronize_norms(network)
    assert not any(type(module) is nn.BatchNorm2d for module in network.modules())
    for name, reason in (
        ("cait_xxs24_224", "takes images of one size"),
        ("eva02_tiny_patch14_224", "strides"),
    ):
        with pytest.raises(UserError, match=f"{name} .*{reason}"):
            build(name)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_networks_of_timm_begin_with_weights_of_classification(name: str) -> None:
    """At another size than theirs, and with sides that differ."""
    network = build(name, 96, neck="pyramid", drop_path=0.1)
    given = create_model(name).state_dict()
    fitted, fresh, _ = fitted_weights(network, given)
    own = {key for key in network.state_dict() if key.startswith("backbone.")}
    assert set(fitted) == own
    assert set(fresh) == set(network.state_dict()) - own
    network.load_state_dict(fitted, strict=False)
    assert tuple(network.eval()(torch.zeros(1, 3, 96, 130)).shape) == (1, 5, 24, 36)
    network.train()
    first, again, other = (
        network.backbone(torch.ones(2, 3, 96, 96), drop_path_seed=seed)[-1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    if name.startswith("vit"):
        assert "backbone.body.model.pos_embed" in network.no_weight_decay()
