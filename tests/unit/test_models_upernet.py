"""UperNet: names of mmsegmentation, timm's maps, weights that begin it, any size of image, its loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import UserError
from horovod_volo.dense.backbones import build_backbone
from horovod_volo.dense.upernet import HEADS, UperNet, fitted_weights, pixel_cross_entropy, pixel_losses
from horovod_volo.models.build import build_model
from horovod_volo.models.timm_api import create_model
from horovod_volo.models.weights import load_fitted


def build(
    name: str,
    img_size: int = 64,
    *,
    classes: int = 5,
    drop_path: float = 0.0,
) -> UperNet:
    model = Model(model=name, img_size=img_size, drop_path=drop_path)
    return UperNet(model, Segmentation(head_width=16, auxiliary_width=16), classes)


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
    network = build(name, 64).train()
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


def test_weights_for_other_classes_give_all_but_the_classifiers() -> None:
    """LV-ViT's repository has its neck inside of the backbone."""
    torch.manual_seed(0)
    network, source = build("volo_demo"), build("volo_demo", classes=9).state_dict()
    theirs = {
        name.replace("neck.side_layer", "backbone.side_layer"): tensor for name, tensor in source.items()
    }
    weights, fresh, _ = fitted_weights(network, theirs)
    messages = load_fitted(network, weights, "here", heads=HEADS, fresh=fresh)
    assert "the weights are for 9 classes, the images have 5" in " ".join(messages)
    state = network.state_dict()
    assert all(torch.equal(state[name], source[name]) for name in source if "conv_seg" not in name)
    damaged = {name: tensor for name, tensor in weights.items() if "fpn_bottleneck" not in name}
    with pytest.raises(UserError, match="parameters 6 missing"):
        load_fitted(network, damaged, "here", heads=HEADS)


def test_other_networks_are_refused() -> None:
    with pytest.raises(UserError, match=r"resnet18 gives no maps .* VOLO or LV-ViT"):
        build("resnet18")


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_it_is_the_sum_over_labelled_pixels_divided_by_all(ignored: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 5, 9, requires_grad=True)
    masks = torch.randint(7, (3, 20, 35), dtype=torch.uint8)
    masks[torch.rand(masks.shape) < ignored] = IGNORED
    resized = F.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
    plain = F.cross_entropy(resized, masks.long(), ignore_index=IGNORED, reduction="sum") / masks.numel()
    (expected,) = torch.autograd.grad(3.0 * plain, logits)
    loss = pixel_cross_entropy(logits, masks)
    (gradient,) = torch.autograd.grad(3.0 * loss, logits)
    assert torch.allclose(loss, plain, rtol=1e-6, atol=0)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert (float(loss.detach()) > 0) == (ignored < 1)


def test_logits_of_half_the_bits_have_a_loss_in_fp32() -> None:
    logits = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    masks = torch.zeros(2, 32, 32, dtype=torch.uint8)
    half = logits.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        losses = pixel_losses(half, half, masks)
    exact = pixel_cross_entropy(half.detach().float(), masks)
    assert losses.total.dtype == torch.float32
    assert torch.allclose(losses.pixel_loss, exact)
    assert torch.allclose(losses.total, 1.4 * exact)
    losses.total.backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
