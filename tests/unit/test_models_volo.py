"""The networks equal timm's VOLO up to rounding; the training forward, also that of LV-ViT."""

from itertools import product
from typing import Any

import pytest
import torch
from network_samples import perturbed, random_images, small_lvvit, unchanged
from torch import Tensor, nn

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.core.errors import UserError
from horovod_volo.models.blocks import Block
from horovod_volo.models.build import build_model, check_model, spec_of
from horovod_volo.models.lvvit import LvVit, LvVitBlock
from horovod_volo.models.volo import Volo, fit_position_embedding
from horovod_volo.objective.mixing import Box

timm = pytest.importorskip("timm")
DropPath = pytest.importorskip("timm.layers").DropPath


def on_meta(name: str, *, img_size: int, drop_path: float = 0.0) -> Volo:
    """Build a network without the memory for its weights."""
    with torch.device("meta"):
        return build_model(name, img_size=img_size, num_classes=1000, drop_path=drop_path)


def demo(side: int = 64) -> Volo:
    torch.manual_seed(0)
    return perturbed(build_model("volo_demo", img_size=side, num_classes=10, drop_path=0.0))


def demo_of_lvvit(side: int = 64) -> LvVit:
    return perturbed(small_lvvit(img_size=side), strength=0.05)


@pytest.mark.parametrize(
    ("name", "side"),
    [("volo_d1", 224), ("volo_d2", 384), ("volo_d3", 448), ("volo_d4", 448), ("volo_d5", 512)],
)
def test_weights_have_timms_names_and_shapes(name: str, side: int) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(f"{name}_{side}")
    shapes = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    ours = on_meta(name, img_size=side)
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == shapes
    assert ours.no_weight_decay() == theirs.no_weight_decay() == {"pos_embed", "cls_token"}


@pytest.mark.parametrize("build", [demo, demo_of_lvvit])
def test_images_of_another_size_are_seen_as_by_a_network_of_that_size(build: Any) -> None:
    model, other, images = build(), build(96), random_images(2, side=96)
    resized, messages = fit_position_embedding(other, model.state_dict())
    assert messages == ["position embedding resized from 4 x 4 to 6 x 6"]
    other.load_state_dict(resized)
    for found, expected in zip(
        model.training_logits(images, unchanged), other.training_logits(images, unchanged), strict=True
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.eval()(images), other.eval()(images))
    model(images).sum().backward()
    assert model.pos_embed.grad.abs().sum() > 0


def test_initial_weights_of_lvvit_have_the_published_distributions() -> None:
    model = small_lvvit(embed_dim=192)
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


def test_evaluation_equals_timms_with_the_weights_of_either() -> None:
    torch.manual_seed(0)
    ours = perturbed(build_model("volo_d1", img_size=224, num_classes=1000, drop_path=0.1)).eval()
    theirs = timm.create_model("volo_d1_224").eval()
    picture = random_images(1, 224)
    with torch.inference_mode():
        expected = ours(picture)  # (1, 1000)
        assert (theirs(picture) - expected).abs().max() > 1e-2  # other weights, other logits
        theirs.load_state_dict(ours.state_dict(), strict=True)
        torch.testing.assert_close(theirs(picture), expected, rtol=0, atol=1e-5)
        ours.load_state_dict(perturbed(theirs).state_dict(), strict=True)
        assert (ours(picture) - expected).abs().max() > 1e-2
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [(demo, [(3, 8, 8, 48), (3, 4, 4, 96)]), (demo_of_lvvit, [(3, 4, 4, 48), (3, 4, 4, 48)])],
)
@torch.inference_mode()
def test_the_same_box_is_swapped_after_the_stem_and_before_the_head(build, shapes):
    """Of an odd batch the middle image is its own partner."""
    model, pictures = build().eval(), random_images(3, 64)
    box = Box(top=1, left=0, height=2, width=3, grid=4)
    grids: list[Tensor] = []

    def watched(grid: Tensor) -> Tensor:
        grids.append(grid)
        return box.swap_tokens(grid)

    def only_before(grid: Tensor) -> Tensor:
        grids.append(grid)
        return box.swap_tokens(grid) if len(grids) == 3 else grid

    class_logits, token_logits = model.training_logits(pictures, watched)
    assert [tuple(grid.shape) for grid in grids] == shapes
    assert torch.equal(grids[0], model.stem(pictures))
    class_of_mixed, tokens_of_mixed = model.training_logits(pictures, only_before)
    assert torch.equal(class_logits, class_of_mixed)
    assert not torch.allclose(class_logits, model.training_logits(pictures, unchanged)[0], atol=1e-3)
    grid, mixed = token_logits.view(3, 4, 4, 10), tokens_of_mixed.view(3, 4, 4, 10)
    for image, row, column in product(range(3), range(4), range(4)):
        source = 2 - image if row in (1, 2) and column < 3 else image
        torch.testing.assert_close(grid[image, row, column], mixed[source, row, column], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "rate"), [("volo_d1", 0.2), ("volo_d5", 0.75)])
def test_stochastic_depth_rises_over_the_transformers_only(name: str, rate: float) -> None:
    outlookers, transformers = {"volo_d1": (4, 14), "volo_d5": (12, 36)}[name]
    model = on_meta(name, img_size=224, drop_path=rate)
    rates = [module.rates for module in model.modules() if isinstance(module, Block)]
    assert rates[:outlookers] == [[0.0, 0.0]] * outlookers
    assert all(first == second for first, second in rates)
    per_branch = [first for first, _ in rates[outlookers:]]
    blocks = outlookers + transformers
    expected = [rate * block / (blocks - 1) for block in range(outlookers, blocks)]
    assert per_branch == pytest.approx(expected)


def test_stochastic_depth_of_lvvit_rises_over_all_blocks() -> None:
    model = on_meta("lvvit_s", img_size=224, drop_path=0.3)
    assert model.rates == pytest.approx([0.02 * n for n in range(16)])


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_the_branches_of_lvvit_are_divided(divisor: float) -> None:
    block, tokens = LvVitBlock(32, 2, 3.0, divisor), torch.randn(2, 5, 32)
    between = tokens + block.attn(block.norm1(tokens)) / divisor
    torch.testing.assert_close(block(tokens), between + block.mlp(block.norm2(between)) / divisor)


def test_mistakes_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no model 'vollo_d1'.*volo_d1\?"):
        check_model("vollo_d1", img_size=224, tokens=True)
    for side, nearest in ((33, 32), (199, 192), (201, 208), (17, 32)):
        with pytest.raises(UserError, match=rf"multiple of 16 for volo_d1.* nearest is {nearest}\."):
            check_model("volo_d1", img_size=side, tokens=True)
        check_model("volo_d1", img_size=nearest, tokens=True)


@pytest.mark.parametrize(("name", "crop"), [("volo_d1", 0.96), ("volo_d3", 0.96), ("volo_d5", 1.15)])
def test_evaluation_crops_as_published(name: str, crop: float) -> None:
    assert spec_of(name).crop_pct == crop


def test_arguments_of_the_constructor_and_the_scale_of_the_heads() -> None:
    sizes: dict[str, Any] = {"img_size": 32, "num_classes": 5, "drop_path": 0.0}
    weights = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        weights.append(build_model("volo_demo", **sizes, head_init_scale=scale).state_dict())
    for name, weight in weights[0].items():
        factor = 0.25 if name.startswith(("head.", "aux_head.")) else 1.0
        assert torch.equal(weights[1][name], weight * factor)
    wider = build_model("volo_demo", **sizes, model_kwargs="mlp_ratio=4.0 layers=(1,2,1,1)")
    assert wider.network[2][1].mlp.fc1.out_features == 4 * 96
    assert build_model("resnet18", **sizes, model_kwargs="drop_rate=0.3").drop_rate == 0.3
    for name, wrong in (("volo_demo", "drop_rate"), ("resnet18", "depth"), ("lvvit_t", "layer")):
        with pytest.raises(UserError, match=wrong):
            build_model(name, **sizes, model_kwargs=f"{wrong}=1")
