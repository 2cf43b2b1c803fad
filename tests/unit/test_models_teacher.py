"""A teacher of any architecture labels each cell with its own head; networks that cannot are refused."""

import pytest
import torch
from network_samples import random_images

from horovod_volo.core.errors import UserError
from horovod_volo.labelling.generate import TeacherChoice, load_teacher, token_logits
from horovod_volo.models.build import build_model
from horovod_volo.models.timm_api import create_model
from tests.smoke.conftest import save_run

CLASSES = 7
SMALL_SWIN = {"img_size": 96, "window_size": 3, "depths": (1, 1, 1, 1)}


def network_of(name: str, **options: object) -> torch.nn.Module:
    """Build a timm network with random weights, large enough for visible differences."""
    torch.manual_seed(0)
    network = create_model(name, num_classes=CLASSES, **options).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith(("head", "fc", "aux_head")):
                parameter.normal_()
    return network


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "options", "head"),
    [
        ("resnet18", {}, "fc"),
        ("swin_tiny_patch4_window7_224", SMALL_SWIN, "head.fc"),  # its maps are channels-last
    ],
)
def test_a_linear_head_after_a_map(name, options, head):
    network, batch = network_of(name, **options), random_images(2, 96)
    cells, logits = network.forward_features(batch), token_logits(network, batch)
    last = cells if head == "head.fc" else cells.permute(0, 2, 3, 1)
    expected = network.get_submodule(head)(last).permute(0, 3, 1, 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.mean(dim=(2, 3)), network(batch))
    assert logits.shape == (2, CLASSES, 3, 3)


@torch.inference_mode()
def test_a_convolutional_network_with_a_norm_in_its_head():
    network, batch = network_of("convnext_atto"), random_images(2, 96)
    cells = network.forward_features(batch).permute(0, 2, 3, 1)
    norm = network.head.norm
    expected = network.head.fc(torch.layer_norm(cells, cells.shape[-1:], norm.weight, norm.bias, norm.eps))
    torch.testing.assert_close(token_logits(network, batch), expected.permute(0, 3, 1, 2))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}, 0),
        ("deit_tiny_distilled_patch16_224", {}, 2),
    ],
)
def test_each_token_of_a_transformer_has_the_heads_logits(name, options, prefix):
    network, batch = network_of(name, img_size=64, **options), random_images(2, 64)
    tokens = network.fc_norm(network.forward_features(batch)[:, prefix:])
    expected = network.head(tokens)
    if prefix == 2:
        expected = (expected + network.head_dist(tokens)) / 2
    logits = token_logits(network, batch)
    torch.testing.assert_close(logits.flatten(2), expected.transpose(1, 2))
    assert logits.shape == (2, CLASSES, 4, 4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["volo_demo", "volo_d1_224", "lvvit_t"])
def test_networks_with_an_auxiliary_head_label_cells_with_it(name):
    if name == "volo_d1_224":  # timm's
        network = network_of(name, img_size=64)
    else:
        network = build_model(name, img_size=64, num_classes=CLASSES, drop_path=0.0).eval()
    batch = random_images(2, 64)
    features = network.forward_features(batch)  # (images, 1 + 16, channels)
    logits = token_logits(network, batch)
    expected = network.aux_head(features[:, 1:]).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    torch.testing.assert_close(logits, expected)
    # Evaluation adds half of each class's highest token logit to the class token's.
    whole = network.head(features[:, 0])
    torch.testing.assert_close(whole + 0.5 * logits.amax(dim=(2, 3)), network(batch))


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (torch.nn.Linear(3, 3), "no separate features and head"),
        (create_model("crossvit_tiny_240", num_classes=CLASSES), "neither a map nor a sequence"),
    ],
)
def test_networks_that_cannot_label_cells_are_refused(network, reason):
    with pytest.raises(UserError, match=rf"{type(network).__name__} cannot label .*{reason}.* Take a conv"):
        token_logits(network.eval(), random_images(1, 240))


def load(name: str, weights: object = "", *, side: int = 64, classes: str = "abcdefg"):
    return load_teacher(TeacherChoice(name, str(weights), image_side=side), classes)


def test_weights_and_normalisation_are_the_teachers_own(tmp_path):
    network = network_of("vit_tiny_patch16_224", img_size=64)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    teacher = load("vit_tiny_patch16_224", tmp_path / "w.pth")
    assert (teacher.mean, teacher.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert teacher.image_side == 64
    batch = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        expected = token_logits(network, batch)
    torch.testing.assert_close(token_logits(teacher.network, batch), expected)
    assert teacher.name == load("vit_tiny_patch16_224", tmp_path / "w.pth").name
    with torch.no_grad():
        network.head.bias[0] += 1e-3
    torch.save(network.state_dict(), tmp_path / "o.pth")
    assert teacher.name != load("vit_tiny_patch16_224", tmp_path / "o.pth").name
    assert teacher.name.startswith("vit_tiny_patch16_224 at 64 pixels, weights ")


def test_a_run_folder_is_a_teacher(tmp_path):
    checkpoint = save_run(tmp_path / "run", names="abcdefg") / "checkpoints" / "best"
    teachers = [load(str(folder), side=0) for folder in (tmp_path / "run", checkpoint)]
    named, batch = load("volo_demo", checkpoint, side=64), torch.rand(1, 3, 64, 64)
    with pytest.raises(UserError, match=r"images have 7 class folders, with 'g' for 'f'\. Both"):
        load(str(tmp_path / "run"), side=0, classes="abcdegf")
    assert named.name.startswith("volo_demo at 64")
    first, *labels = [token_logits(teacher.network, batch) for teacher in (named, *teachers)]
    for label in labels:
        torch.testing.assert_close(label, first)


def test_mistakes_are_errors_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match=r"no model 'resnet81'\. Did you mean"):
        load("resnet81")
    with pytest.raises(UserError, match=r"resnet18 has no weights yet\. Name a file .* --teacher-pretrained"):
        load("resnet18")
    torch.save(network_of("resnet18").state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match="resnet18 has 7 classes, the images have 9 class folders"):
        load("resnet18", tmp_path / "w.pth", classes="abcdefghi")
    with pytest.raises(UserError, match=r"of another model: parameters \d+ missing \(first: layer1\.2\."):
        load("resnet34", tmp_path / "w.pth")
