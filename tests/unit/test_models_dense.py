"""SSD and UperNet: names, shapes and order of outputs, sizes of images, weights to start from."""

import pytest
import torch
import torch.nn.functional as F
from network_samples import perturbed, random_images
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import UserError
from horovod_volo.dense import ssd
from horovod_volo.dense.anchors import SSD300, AnchorRule, anchor_rule, build_anchors
from horovod_volo.dense.backbones import build_backbone, fitted_weights
from horovod_volo.dense.ssd import SSD, ResNetTrunk, build_ssd
from horovod_volo.dense.upernet import HEADS, UperNet, pixel_cross_entropy, pixel_losses
from horovod_volo.models.build import build_model
from horovod_volo.models.timm_api import create_model
from horovod_volo.models.weights import load_fitted

ANCHORS_PER_POSITION = (4, 6, 6, 6, 4, 4)


class TinyTrunk(nn.Sequential):
    """A trunk of one convolution at stride 8."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(3, channels, 7, stride=8, padding=3), nn.ReLU())

    def forward(self, images: Tensor, drop_path_seed: int | None = None) -> list[Tensor]:  # type: ignore[override]
        assert drop_path_seed is None
        return [super().forward(images)]


class PositionHead(nn.Module):
    """Instead of a head: each shape's values are shape, row, column and side of the map."""

    def __init__(self, shapes: int, values: int) -> None:
        super().__init__()
        self.shapes, self.values = shapes, values

    def forward(self, features: Tensor) -> Tensor:
        """Return (batch, shapes x values, rows, columns)."""
        batch, _, side, _ = features.shape
        shape, row, column = torch.meshgrid(
            torch.arange(self.shapes), torch.arange(side), torch.arange(side), indexing="ij"
        )
        coded = torch.stack([shape, row, column, torch.full_like(row, side)], dim=1).float()
        coded = F.pad(coded, (0, 0, 0, 0, 0, self.values - 4))  # (shapes, values, rows, columns)
        return coded.flatten(0, 1).expand(batch, -1, -1, -1).contiguous(memory_format=torch.channels_last)


def tiny(channels: int = 6, classes: int = 5) -> SSD:
    torch.manual_seed(0)
    return SSD(TinyTrunk(channels), [channels], classes, SSD300)


@pytest.mark.parametrize("rule", [SSD300, anchor_rule(320)])
@torch.inference_mode()
def test_outputs_are_in_the_order_of_the_anchors(rule: AnchorRule) -> None:
    model = tiny().eval()
    for heads, values in ((model.box_heads, 4), (model.class_heads, 6)):
        for number, shapes in enumerate(ANCHORS_PER_POSITION):
            heads[number] = PositionHead(shapes, values)
    images = random_images(1, rule.image_size).contiguous(memory_format=torch.channels_last)
    maps = model.to(memory_format=torch.channels_last).feature_maps(images)
    assert tuple(each.shape[-1] for each in maps) == rule.sides
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in maps)
    assert rule.anchors_per_position == ANCHORS_PER_POSITION
    boxes, logits = model(images)
    assert boxes.shape == build_anchors(rule).centres[None].shape
    assert torch.equal(boxes, logits[..., :4])
    shape, row, column, side = boxes[0].unbind(1)
    steps = torch.tensor([rule.steps[rule.sides.index(int(each))] for each in side]) / rule.image_size
    centres = build_anchors(rule).centres
    torch.testing.assert_close(centres[:, 0], ((column + 0.5) * steps).clamp(max=1))
    torch.testing.assert_close(centres[:, 1], ((row + 0.5) * steps).clamp(max=1))
    for map_side in rule.sides:
        for number in shape[side == map_side].unique():
            of_shape = centres[(side == map_side) & (shape == number), 2:]
            assert len(of_shape) == map_side**2
            assert len(of_shape.unique(dim=0)) == 1


def test_new_convolutions_have_the_published_distribution() -> None:
    model = tiny(64, 20)
    for layer in (model.extras[0][0], model.extras[4][3], model.box_heads[1], model.class_heads[0]):  # type: ignore[index]
        assert isinstance(layer, nn.Conv2d)
        outputs, inputs, *kernel = layer.weight.shape
        bound = (6 / ((outputs + inputs) * kernel[0] * kernel[1])) ** 0.5
        assert 0.99 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


@torch.inference_mode()
def test_only_the_stride_of_the_third_stage_is_removed() -> None:
    torch.manual_seed(0)
    resnet, trunk = perturbed(create_model("resnet50")).eval(), ResNetTrunk("resnet50").eval()
    trunk.load_state_dict({key: resnet.state_dict()[key] for key in trunk.state_dict()})
    images = random_images(1, 70)
    assert trunk(images)[0].shape == (1, 1024, 9, 9)
    before = resnet.layer2(resnet.layer1(resnet.maxpool(resnet.act1(resnet.bn1(resnet.conv1(images))))))
    # The layers after the one with stride 2 are 1 x 1, so every second position of the block is timm's.
    ours, theirs = trunk.layer3[0](before)[..., ::2, ::2], resnet.layer3[0](before)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet50d", "deit_tiny_patch16_224"])
def test_networks_without_the_maps_are_refused(name: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=f"{name} cannot be the trunk"):
        ResNetTrunk(name)
    with pytest.raises(UserError, match=rf"{name} gives no maps .* VOLO or LV-ViT"):
        build(name)


@pytest.mark.parametrize("side", [128, 320])
def test_volo_gives_the_first_two_maps(side: int) -> None:
    rule = anchor_rule(side)
    torch.manual_seed(0)
    model = build_ssd(Model(model="volo_demo", img_size=side), 5).eval()
    with torch.inference_mode():
        maps = model.feature_maps(random_images(1, side))
        boxes, logits = model(random_images(1, side))
    assert tuple(each.shape[-1] for each in maps) == rule.sides
    assert maps[0].mean(dim=1).abs().max() < 1e-4  # each position has a norm
    assert boxes.shape[1] == logits.shape[1] == len(build_anchors(rule).centres)


@pytest.mark.parametrize("name", ["resnet18", "volo_demo"])
def test_weights_of_classification_begin_the_trunk_of_ssd(name: str) -> None:
    torch.manual_seed(0)
    source = build_model(name, img_size=304, num_classes=7, drop_path=0.0)
    model = build_ssd(Model(model=name, img_size=320), 5)
    fitted, fresh, messages = fitted_weights(model, ssd.HEADS, source.state_dict())
    assert set(fitted) | set(fresh) == set(model.state_dict())
    assert not set(fitted) & set(fresh)
    assert all(name.startswith("backbone.") for name in fitted)
    assert "tensors of classification alone are left out" in messages[-1]
    model.load_state_dict(fitted, strict=False)
    boxes, logits = model(torch.randn(2, 3, 320, 320), 1)
    (boxes.square().mean() + logits.square().mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    again, none, _ = fitted_weights(model, ssd.HEADS, model.state_dict())
    assert set(again) == set(model.state_dict())
    assert none == []


def build(name: str, img_size: int = 64, *, classes: int = 5) -> UperNet:
    settings = Segmentation(head_width=16, auxiliary_width=16)
    return UperNet(Model(model=name, img_size=img_size), settings, classes)


def test_the_heads_have_mmsegmentations_names() -> None:
    network = build("volo_demo")
    names = [name for name, _ in network.decode_head.named_parameters()]
    norm = ("conv.weight", "bn.weight", "bn.bias")
    units = [f"psp_modules.{number}.1" for number in range(4)]
    units += ["bottleneck", "fpn_bottleneck"]
    units += [f"{part}.{number}" for part in ("lateral_convs", "fpn_convs") for number in range(3)]
    expected = {f"{unit}.{part}" for unit in units for part in norm} | {"conv_seg.weight", "conv_seg.bias"}
    assert set(names) == expected
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
    weights, fresh, messages = fitted_weights(large, HEADS, small.state_dict())
    load_fitted(large, weights, "here", heads=HEADS, fresh=fresh)
    assert any("position embedding resized" in message for message in messages)
    images = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.allclose(small(images), large(images), atol=1e-5)
        assert not torch.allclose(build(name, 96).eval()(images), large(images), atol=1e-3)
        part = images[:, :, :50, :85]  # sides need not be multiples of 16
        torch.testing.assert_close(small(part), small(F.pad(part, (0, 11, 0, 14)))[:, :, :50, :85])


def test_weights_of_classification_begin_the_backbone_of_upernet() -> None:
    trained = build_model("volo_demo", img_size=32, num_classes=7, drop_path=0.0)
    network = build("volo_demo")
    weights, fresh, messages = fitted_weights(network, HEADS, trained.state_dict())
    before = network.decode_head.conv_seg.weight.clone()
    loaded = load_fitted(network, weights, "here", heads=HEADS, fresh=fresh)
    assert torch.equal(network.backbone.network[2][0].mlp.fc1.weight, trained.network[2][0].mlp.fc1.weight)  # type: ignore[union-attr,index]
    assert torch.equal(network.decode_head.conv_seg.weight, before)
    assert any("all but the backbone begins with fresh weights" in message for message in messages)
    assert any("tensors of classification alone are left out" in message for message in messages)
    assert "tensors loaded" in loaded[0]


def test_weights_for_other_classes_give_all_but_the_classifiers() -> None:
    """LV-ViT's repository has its neck inside of the backbone."""
    torch.manual_seed(0)
    network, source = build("volo_demo"), build("volo_demo", classes=9).state_dict()
    theirs = {
        name.replace("neck.side_layer", "backbone.side_layer"): tensor for name, tensor in source.items()
    }
    weights, fresh, _ = fitted_weights(network, HEADS, theirs)
    messages = load_fitted(network, weights, "here", heads=HEADS, fresh=fresh)
    assert "the weights are for 9 classes, the images have 5" in " ".join(messages)
    state = network.state_dict()
    assert all(torch.equal(state[name], source[name]) for name in source if "conv_seg" not in name)
    damaged = {name: tensor for name, tensor in weights.items() if "fpn_bottleneck" not in name}
    with pytest.raises(UserError, match="parameters 6 missing"):
        load_fitted(network, damaged, "here", heads=HEADS)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_the_loss_is_the_sum_over_labelled_pixels_divided_by_all(ignored: float) -> None:
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
    assert half.grad.dtype == torch.bfloat16
