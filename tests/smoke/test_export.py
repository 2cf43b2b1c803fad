"""tools/export of networks for classes, pixels and boxes: what is written, checked, read back and refused."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from horovod_volo import export
from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump
from horovod_volo.dense.anchors import anchor_rule, build_anchors, decode
from horovod_volo.dense.trained import TrainedDense, dense_task, load_dense
from horovod_volo.models import timm_export
from horovod_volo.models.timm_export import fixed_images
from horovod_volo.models.weights_header import header_of, read_class_names, read_statistics
from horovod_volo.monitor.pictures import class_colors
from tests.smoke.conftest import save_run

NAMES = tuple(f"class {number}" for number in range(10))
WRITTEN = ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "demo", names=NAMES)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one-line error message of an export that is refused."""
    capsys.readouterr()
    assert export.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    return line


def test_names_of_classes_and_statistics_are_in_each_file(demo_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    assert export.main([str(demo_run), str(folder), "--onnx"]) == export.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.onnx", WRITTEN[1]]
    assert read_class_names(str(folder)) == NAMES
    assert json.loads((folder / "config.json").read_text())["label_names"] == list(NAMES)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    properties = onnx.load(folder / "model.onnx").metadata_props
    found = {each.key: json.loads(each.value) for each in properties}
    assert found == {"classes": list(NAMES), "mean": mean, "std": std}
    assert read_statistics(str(folder)) == (tuple(mean), tuple(std))


def test_an_export_is_replaced_only_with_force(demo_run: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "export"
    assert export.main([str(demo_run), str(folder)]) == export.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "evaluated by the class token alone: the auxiliary head was never trained" in lines[0]
    difference = re.fullmatch(r"timm: outputs differ by (\S+) at most", lines[2])
    assert float(difference[1]) <= 1e-5
    assert "timm has no volo_demo; timm.models.volo.VOLO can" in lines[-1]
    before = (folder / "config.json").stat()
    assert "There is an export in" in refused(capsys, demo_run, folder)
    assert (folder / "config.json").stat() == before
    assert export.main([str(demo_run), str(folder), "--force", "--img-size", "32"]) == export.DONE
    assert (folder / "config.json").stat() != before
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    (folder / "notes.txt").touch()
    assert "(notes.txt)" in refused(capsys, demo_run, folder, "--force")
    assert "holds the weights to export" in refused(capsys, folder / "model.safetensors", folder, "--force")
    (folder / "notes.txt").unlink()
    (folder / "config.json").unlink()
    assert "(model.safetensors)" in refused(capsys, demo_run, folder, "--force")
    assert export.main([str(demo_run), "/dev/null/export"]) == 2
    assert "cannot export to /dev/null/export" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{run}/nowhere --model volo_demo", "There are no weights at"),
        ("{weights}", "that names the model of the weights in"),
        ("{run} --model volo_dmeo", "Did you mean volo_demo?"),
        ("{run} --img-size 65", "--img-size must be a multiple of 16"),
        ("{run}/checkpoints/best --use-ema", "There are no averaged weights (EMA) in"),
    ],
)
def test_a_mistake_is_one_message(arguments, message, demo_run: Path, tmp_path: Path, capsys) -> None:
    source, *flags = arguments.format(run=demo_run, weights=demo_run.with_name("weights.pth")).split()
    assert message in refused(capsys, source, tmp_path / "export", *flags)
    assert not list(tmp_path.iterdir())


def test_different_logits_are_an_error_and_nothing_is_written(demo_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timm_export, "timm_difference", lambda trained, folder: 2e-5)
    assert export.main([str(demo_run), str(tmp_path / "export")]) == export.DIFFERS
    assert "timm gives outputs that differ by 2.0e-05" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


CLASSES = {"segmentation": 7, "detection": 6}
CLASS_NAMES = {task: [f"class of {number}" for number in range(count)] for task, count in CLASSES.items()}


@pytest.fixture(scope="module", params=["segmentation", "detection"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / request.param
    config = parse(["--recipe", f"{request.param}_demo", "--img-size", "64"]).config
    torch.manual_seed(0)
    network = dense_task(request.param).build(config, CLASSES[request.param]).module
    (folder / "checkpoints" / "last").mkdir(parents=True)
    weights = folder / "checkpoints" / "last" / "model.safetensors"
    save_file(network.state_dict(), weights, metadata=header_of(CLASS_NAMES[request.param]))
    (folder / "resolved.toml").write_text(dump(config))
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    folder = trained.with_name(f"{trained.name}_export")
    assert export.main([str(trained), str(folder), "--onnx"]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.onnx", "model.pth"]
    return folder


def test_the_export_gives_what_an_evaluation_uses(trained: Path, exported: Path) -> None:
    """Weights have the network's names: those of mmsegmentation, by tests/unit/test_models_dense.py."""
    task = trained.name
    about = json.loads((exported / "config.json").read_text())
    assert (about["task"], about["num_classes"], about["img_size"]) == (task, CLASSES[task], 64)
    assert about["classes"] == CLASS_NAMES[task]
    session = onnxruntime.InferenceSession(exported / "model.onnx", providers=["CPUExecutionProvider"])
    images = fixed_images(3, 64)
    found = session.run(None, {"images": images.numpy()})
    network = load_dense(str(trained), image_side=0, use_ema=False).network
    content = torch.load(exported / "model.pth", weights_only=True)
    assert content["meta"]["architecture"] == "volo_demo"
    assert content["state_dict"].keys() == network.state_dict().keys()
    with torch.inference_mode():
        if task == "segmentation":
            expected = [network(images)]
            assert expected[0].shape == (3, 7, 64, 64)
        else:
            values, logits = network(images)
            boxes = decode(values, build_anchors(anchor_rule(64)))
            expected = [boxes, logits.softmax(dim=2)[..., 1:]]
            assert expected[1].shape == (3, 372, 6)
    assert [output.name for output in session.get_outputs()] == (
        ["logits"] if task == "segmentation" else ["boxes", "probabilities"]
    )
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-4)
    sides = session.get_inputs()[0].shape[2:]
    assert sides == (["height", "width"] if task == "segmentation" else [64, 64])
    for height, width in ((33, 90), (208, 17)) if task == "segmentation" else ():
        odd = fixed_images(2, height, width)
        with torch.inference_mode():
            logits = network(odd).numpy()
        assert logits.shape == (2, 7, height, width)
        np.testing.assert_allclose(session.run(None, {"images": odd.numpy()})[0], logits, atol=1e-4)


@pytest.mark.parametrize("trained", ["segmentation"], indirect=True)
def test_an_image_size_makes_the_sides_fixed(trained: Path, tmp_path: Path) -> None:
    assert export.main([str(trained), str(tmp_path / "export"), "--onnx", "--img-size", "96"]) == 0
    model = onnx.load(tmp_path / "export" / "model.onnx")
    for values, channels in ((model.graph.input[0], 3), (model.graph.output[0], 7)):
        shape = [axis.dim_param or axis.dim_value for axis in values.type.tensor_type.shape.dim]
        assert shape == ["batch", channels, 96, 96]
    refused = {"Col2Im", "GatherND", "ScatterND"}
    assert refused & {node.op_type for node in model.graph.node} == set()


@pytest.mark.parametrize("trained", ["segmentation"], indirect=True)
def test_the_state_dict_names_the_classes_and_can_be_finetuned(trained: Path, exported: Path) -> None:
    file = exported / "model.pth"
    meta, names = torch.load(file, weights_only=True)["meta"], CLASS_NAMES["segmentation"]
    assert list(meta["dataset_meta"]["classes"]) == list(meta["CLASSES"]) == list(meta["classes"]) == names
    assert meta["dataset_meta"]["palette"] == meta["PALETTE"] == class_colors()[:7].tolist()
    task = dense_task("segmentation")
    config = parse(["--recipe", "segmentation_demo", "--img-size", "64", "--finetune", str(file)]).config
    torch.manual_seed(1)
    built = task.build(config, 7)
    built.load_weights(config.model.finetune)
    network = built.module
    written = load_file(trained / "checkpoints" / "last" / "model.safetensors")
    assert network.state_dict().keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in network.state_dict().items())


def test_wrong_exports_write_nothing(trained, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "export"
    assert "are for networks of classification" in refused(capsys, trained, folder, "--model", "volo_d1")
    assert "must be a multiple of 16" in refused(capsys, trained, folder, "--img-size", "72")
    monkeypatch.setattr(TrainedDense, "reloaded_difference", lambda *_: float("nan"))
    assert export.main([str(trained), str(folder)]) == 1
    assert not folder.exists()
