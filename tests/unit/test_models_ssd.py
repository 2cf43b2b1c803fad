"""SSD: shapes, the order of its outputs, the number of its parameters, and its trunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from network_samples import perturbed, random_images
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.core.errors import UserError
from horovod_volo.dense.anchors import SSD300, AnchorRule, anchor_rule, build_anchors
from horovod_volo.dense.ssd import SSD, ExtraMap, ResNetTrunk, build_ssd, extra_maps, fitted_weights
from horovod_volo.models.build import build_model
from horovod_volo.models.timm_api import create_model

ANCHORS_PER_POSITION = (4, 6, 6, 6, 4, 4)
NARROW = tuple(ExtraMap(3, 4, halves=halves) for halves in (True, True, True, False, False))


class TinyTrunk(nn.Sequential):
    """A trunk of one convolution at stride 8."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(3, channels, 7, stride=8, padding=3), nn.ReLU())

    def forward(self, images: Tensor, drop_path_seed: int | None = None) -> list[Tensor]:  # type: ignore[override]
        """Return one map."""
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


def with_anchors(channels: int, classes: int, extras: tuple[ExtraMap, ...]) -> SSD:
    return SSD(
        TinyTrunk(channels), [channels], classes, extras=extras, anchors_per_position=ANCHORS_PER_POSITION
    )


def tiny() -> SSD:
    torch.manual_seed(0)
    return with_anchors(6, 5, NARROW)


@pytest.mark.parametrize(("name", "parameters"), [("resnet34", 19_975_222), ("resnet50", 22_894_902)])
def test_the_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):  # without the memory for the weights
        model = build_ssd(Model(model=name, img_size=300), 80)
        assert sum(map(Tensor.numel, model.parameters())) == parameters
        theirs, ours = create_model(name).state_dict(), model.backbone.state_dict()
    assert {key.split(".")[0] for key in theirs.keys() - ours.keys()} == {"layer4", "fc"}
    assert all(theirs[key].shape == value.shape for key, value in ours.items())


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
    torch.manual_seed(0)
    model = with_anchors(64, 20, extra_maps(SSD300.sides, 1))
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
def test_a_trunk_that_cannot_be_changed_is_refused(name: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=f"{name} cannot be the trunk"):
        ResNetTrunk(name)


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
def test_weights_of_classification_begin_the_backbone(name: str) -> None:
    torch.manual_seed(0)
    source = build_model(name, img_size=304, num_classes=7, drop_path=0.0)
    model = build_ssd(Model(model=name, img_size=320), 5)
    fitted, fresh, messages = fitted_weights(model, source.state_dict())
    assert set(fitted) | set(fresh) == set(model.state_dict())
    assert not set(fitted) & set(fresh)
    assert all(name.startswith("backbone.") for name in fitted)
    assert "tensors of classification alone are left out" in messages[-1]
    model.load_state_dict(fitted, strict=False)
    again, none, _ = fitted_weights(model, model.state_dict())
    assert set(again) == set(model.state_dict())
    assert none == []
