"""Exported networks give the same logits as the original, with operations that all runtimes support.

For timm they are bit-identical, except that timm sums outlook attention in another order; in ONNX they are
equal up to rounding.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from network_samples import perturbed, small_lvvit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.models import onnx_export
from horovod_volo.models.build import build_model, spec_of
from horovod_volo.models.pretrained import PretrainedModel, load_pretrained
from horovod_volo.models.timm_export import (
    CONFIG,
    WEIGHTS,
    atomic_folder,
    config_of,
    timm_difference,
    write_timm_folder,
)

# kernel, padding, stride, rows, columns: VOLO's, then odd sizes and windows that do not reach the last row
GEOMETRIES = [(3, 1, 2, 28, 28), (3, 1, 2, 7, 9), (3, 1, 1, 5, 6), (2, 0, 2, 6, 7), (5, 2, 3, 11, 8)]

REFUSED = {"Col2Im", "GatherND", "GatherElements", "ScatterND", "ScatterElements"}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def built(name: str, side: int, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(name, img_size=side, num_classes=classes, drop_path=0.0)
    return perturbed(model).eval().requires_grad_(False)


def trained(folder: Path, name: str, side: int, classes: int = 10) -> PretrainedModel:
    torch.save(built(name, side, classes).state_dict(), folder / "weights.pt")
    return load_pretrained(str(folder / "weights.pt"), name=name, image_side=side)


def exported(folder: Path, network: PretrainedModel) -> Path:
    made = folder / "export"
    made.mkdir()
    write_timm_folder(network, made)
    return made


def operations(file: Path) -> Counter[str]:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(file)
    onnx.checker.check_model(model)
    assert not model.functions
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(("kernel", "padding", "stride", "rows", "columns"), GEOMETRIES)
def test_windows_by_convolutions_equal_unfold_and_fold(kernel, padding, stride, rows, columns) -> None:
    cells, weights = random(2, 6, rows, columns), onnx_export.place_weights(6, kernel)
    windows = onnx_export.unfold_windows(cells, weights, padding=padding, stride=stride)
    expected = F.unfold(cells, kernel, padding=padding, stride=stride)
    torch.testing.assert_close(windows.flatten(2), expected, rtol=0, atol=1e-6)
    folded = onnx_export.fold_windows(windows, weights, (rows, columns), padding=padding, stride=stride)
    expected = F.fold(windows.flatten(2), (rows, columns), kernel, padding=padding, stride=stride)
    torch.testing.assert_close(folded, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("cells", "height", "width"), [(1, 4, 7), (2, 4, 7), (3, 4, 7), (6, 4, 7), (6, 32, 43)]
)
def test_pooling_by_matrices_equals_adaptive_pooling(cells: int, height: int, width: int) -> None:
    maps = random(2, 5, height, width)
    pooled = onnx_export.MatrixPool(cells)(maps)
    torch.testing.assert_close(pooled, F.adaptive_avg_pool2d(maps, cells), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "side"), [("volo_demo", 64), ("lvvit", 64), ("test_resnet", 64)])
def test_onnx_gives_the_same_logits_for_any_batch(name: str, side: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    network = perturbed(small_lvvit()).eval().requires_grad_(False) if name == "lvvit" else built(name, side)
    file = tmp_path / "model.onnx"
    onnx_export.write_onnx(network, file, image_side=side, batch=0, opset=18)
    difference = onnx_export.onnx_difference(network, file, [(1, side, side), (3, side, side)])
    print(f"{name}: {difference:.1e}, {dict(operations(file))}")
    assert difference <= 1e-4
    assert not REFUSED & set(operations(file))
    other = perturbed(network)  # in target; the comparison must detect it
    assert onnx_export.onnx_difference(other, file, [(1, side, side)]) > 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_fixed_batch_and_a_newer_opset(tmp_path: Path) -> None:
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    file, layers = tmp_path / "model.onnx", (nn.Conv2d(3, 4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(4, 5))
    network = nn.Sequential(*layers).requires_grad_(False)
    onnx_export.write_onnx(network, file, image_side=8, batch=4, opset=21)
    assert onnx_export.onnx_difference(network, file, [(4, 8, 8)]) <= 1e-5
    assert onnx.load(file).opset_import[0].version == 21
    assert runtime.InferenceSession(file).get_inputs()[0].shape == [4, 3, 8, 8]


class DataDependent(nn.Module):
    """A network whose control flow depends on the images, which no ONNX graph can express."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3)) if images.sum() > 0 else images.amax(dim=(2, 3))


def test_a_network_that_torch_cannot_export_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"torch cannot write DataDependent as ONNX \(.*Drop --onnx\."):
        onnx_export.write_onnx(DataDependent(), tmp_path / "model.onnx", image_side=8, batch=1, opset=18)


@pytest.mark.parametrize(
    ("name", "side", "architecture", "arguments"),
    [
        ("volo_demo", 64, "volo_demo", {"img_size", "layers", "embed_dims", "num_heads", "stem_hidden_dim"}),
        ("test_vit", 96, "test_vit", {"img_size"}),
        ("resnet18", 64, "resnet18", set()),
    ],
)
def test_timm_builds_the_same_network_from_an_exported_folder(name, side, architecture, arguments, tmp_path):
    network = trained(tmp_path, name, side)
    made = exported(tmp_path, network)
    config = json.loads((made / CONFIG).read_text())
    assert (config["architecture"], set(config.get("model_args", ()))) == (architecture, arguments)
    pretrained = config["pretrained_cfg"]
    assert pretrained["input_size"] == [3, side, side]
    assert (pretrained["mean"], pretrained["std"]) == (list(network.mean), list(network.std))
    assert (pretrained["crop_pct"], pretrained["num_classes"]) == (network.crop_pct, 10)
    difference = timm_difference(network, made)
    assert difference <= (1e-5 if name.startswith("volo") else 0.0)
    state = load_file(made / WEIGHTS)
    head = next(key for key in state if key.split(".")[0] in ("head", "fc") and key.endswith("bias"))
    save_file(state | {head: state[head] + 0.5}, made / WEIGHTS)
    assert timm_difference(network, made) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_a_network_without_an_auxiliary_head_is_exported_without_it(name: str, tmp_path: Path) -> None:
    """An untrained head is left out; the configuration has timm's argument for that."""
    side, classes = 64, 7
    torch.manual_seed(0)
    source = build_model(name, img_size=side, num_classes=classes, drop_path=0.0)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    network = load_pretrained(str(tmp_path / "weights.pt"), name=name, image_side=side)
    made = exported(tmp_path, network)
    config = json.loads((made / CONFIG).read_text())
    assert config["model_args"]["use_aux_head"] is False
    assert config["pretrained_cfg"]["classifier"] == ["head"]
    assert not any(key.startswith("aux_head") for key in load_file(made / WEIGHTS))
    if name != "lvvit_t":  # timm has no LV-ViT
        assert timm_difference(network, made) <= 1e-5
    again = load_pretrained(str(made), name=name, image_side=side)
    assert "evaluated by the class token alone: the weights have no auxiliary head" in again.messages
    images = random(2, 3, side, side)
    with torch.inference_mode():
        assert torch.equal(again.network(images), network.network(images))


def test_the_crop_is_that_of_the_weights(tmp_path: Path) -> None:
    """timm squashes images for this model; a run here was evaluated on centre crops."""
    name = "convnextv2_nano.fcmae_ft_in22k_in1k_384"
    published = trained(tmp_path, name, 32)
    assert (published.crop_mode, config_of(published)["pretrained_cfg"]["crop_mode"]) == ("squash",) * 2
    (tmp_path / "resolved.toml").write_text(f'[model]\nmodel = "{name}"\nimg_size = 32\n')
    own = load_pretrained(str(tmp_path / "weights.pt"))
    assert spec_of("vgg11.tv_in1k").interpolation == "bilinear"
    assert [spec_of("resnet18.a1_in1k").crop_at(side) for side in (224, 288)] == [0.95, 1.0]  # as timm
    assert config_of(own)["pretrained_cfg"]["interpolation"] == own.interpolation == "bicubic"
    assert (own.crop_mode, config_of(own)["pretrained_cfg"]["crop_mode"]) == ("center",) * 2
    (tmp_path / "resolved.toml").unlink()
    # An export is evaluated with its own crop.
    made = exported(tmp_path, dataclasses.replace(published, crop_mode="center", crop_pct=0.8))

    def crop() -> tuple[str, float]:
        again = load_pretrained(str(made), name=name, image_side=32)
        return again.crop_mode, again.crop_pct

    assert crop() == ("center", 0.8)
    config = (made / CONFIG).read_text()
    (made / CONFIG).unlink()
    assert crop() == ("center", 0.8)  # by the header of its weights
    save_file(load_file(made / WEIGHTS), made / WEIGHTS)  # earlier versions wrote no crop there
    for other in ("{}", "[]", "not JSON"):
        (made / CONFIG).write_text(other)
        assert crop() == (published.crop_mode, published.crop_pct) == ("squash", spec_of(name).crop_pct)
    (made / CONFIG).write_text(config)
    assert crop() == ("center", 0.8)
    # timm's own folders also have the crop of the larger images that they are evaluated on.
    (made / CONFIG).write_text(config.replace('"crop_pct": 0.8', '"crop_pct": 0.8, "test_crop_pct": 1.0'))
    assert crop() == ("center", 1.0)
    (made / CONFIG).write_text(config.replace('"center"', '"border"'))
    with pytest.raises(UserError, match="crop_mode border, which is missing here"):
        crop()


PLAIN_TIMM = """
import json, sys, torch
try:
    import torchvision
except RuntimeError:  # beside a CPU-only torch
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float least) -> Tensor")
import timm
folder, images = sys.argv[1], torch.load(sys.argv[2])
config = json.load(open(f"{folder}/config.json"))
settings = {"num_classes": config["num_classes"], **config["model_args"]}
networks = [
    timm.create_model(f"local-dir:{folder}", pretrained=True),
    timm.create_model(config["architecture"], checkpoint_path=f"{folder}/model.safetensors", **settings),
]
assert not any(name.startswith("horovod") for name in sys.modules)
with torch.inference_mode():
    torch.save([network.eval().requires_grad_(False)(images) for network in networks], sys.argv[3])
"""


def test_timm_alone_loads_an_exported_folder(tmp_path: Path) -> None:
    network, images = trained(tmp_path, "volo_d1", 64, classes=7), random(2, 3, 64, 64)
    made = exported(tmp_path, network)
    config = json.loads((made / CONFIG).read_text())
    assert (config["architecture"], config["model_args"]) == ("volo_d1_224", {"img_size": 64})
    assert config["pretrained_cfg"]["classifier"] == ["head", "aux_head"]
    torch.save(images, tmp_path / "images.pt")
    command = [sys.executable, "-c", PLAIN_TIMM, made, tmp_path / "images.pt", tmp_path / "logits.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        expected = network.network(images)
    for logits in torch.load(tmp_path / "logits.pt"):
        assert logits.shape == (2, 7)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_an_exported_folder_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "export"
    with contextlib.suppress(KeyboardInterrupt), atomic_folder(target, replace=False) as made:
        (made / WEIGHTS).write_text("half")
        raise KeyboardInterrupt
    assert not list(target.parent.iterdir())
    for text, replace in (("first", False), ("second", True)):
        with atomic_folder(target, replace=replace) as made:
            (made / CONFIG).write_text(text)
            assert [path.name for path in target.parent.iterdir() if path == target] == ["export"] * replace
        assert (target / CONFIG).read_text() == text
        assert [path.name for path in target.parent.iterdir()] == ["export"]
    assert (target / CONFIG).stat().st_mode & 0o444 == target.parent.stat().st_mode & 0o444
    move, gone = Path.replace, tmp_path / "missing" / "export"
    monkeypatch.setattr(Path, "replace", lambda old, to: move(old, gone if old.suffix == ".partial" else to))
    with pytest.raises(FileNotFoundError), atomic_folder(target, replace=True) as made:
        (made / CONFIG).write_text("third")
    assert (target / CONFIG).read_text() == "second"
    assert [path.name for path in target.parent.iterdir()] == ["export"]


def test_concurrent_exports_do_not_replace_each_other(tmp_path: Path) -> None:
    target = tmp_path / "export"
    with contextlib.ExitStack() as slower:
        (slower.enter_context(atomic_folder(target, replace=False)) / CONFIG).write_text("slower")
        with atomic_folder(target, replace=False) as faster:
            (faster / CONFIG).write_text("faster")
        with pytest.raises(UserError, match="There is an export in"):
            slower.close()
    assert (target / CONFIG).read_text() == "faster"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
