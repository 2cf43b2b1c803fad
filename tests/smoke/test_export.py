"""tools/export: the commands and programs of docs/export.md, results and errors."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from horovod_volo import export
from horovod_volo.models import onnx_export, timm_export
from horovod_volo.models.build import build_model
from horovod_volo.models.weights_header import header_of, read_class_names, read_statistics
from tests.ranks.launching import run

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
NAMES = [f"class {number}" for number in range(10)]
WRITTEN = ["config.json", "model.safetensors"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, flags=re.S)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


def run_folder(folder: Path, name: str, side: int) -> Path:
    """Write a run folder with the checkpoints best and last; last has averaged weights."""
    torch.manual_seed(0)
    state = build_model(name, img_size=side, num_classes=10, drop_path=0.0).state_dict()
    for checkpoint in ("best", "last"):
        path = folder / "checkpoints" / checkpoint
        path.mkdir(parents=True)
        save_file(state, path / "model.safetensors", metadata=header_of(NAMES))
    save_file({key: 2 * tensor for key, tensor in state.items()}, path / "ema.safetensors")
    (folder / "resolved.toml").write_text(f'[model]\nmodel = "{name}"\nimg_size = {side}\n')
    return folder


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("runs") / "demo", "volo_demo", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the inputs of the document's commands; timm's resnet18 replaces VOLO-D1."""
    folder = tmp_path_factory.mktemp("commands")
    run_folder(folder / "run", "resnet18", 64)
    torch.save(load_file(folder / "run/checkpoints/best/model.safetensors"), folder / "weights.pth")
    return folder


def adapted(text: str, folder: Path) -> str:
    small = text.replace("runs/volo_d1", f"{folder}/run").replace("--model volo_d1", "--model resnet18")
    return small.replace("--img-size 384", "--img-size 96").replace("/path/to/", f"{folder}/")


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_document_runs(command: str, folder: Path) -> None:
    program = f"cd {shlex.quote(str(ROOT))} && {adapted(command, folder)}"
    done = run(["bash", "-c", program], seconds=200)
    assert done.returncode == 0, done.stdout
    assert "timm: outputs differ by 0.0e+00 at most" in done.stdout
    assert ("onnxruntime: outputs differ" in done.stdout) == ("--onnx" in command)


def test_the_commands_wrote_their_exports(folder: Path) -> None:
    exports = {path.name: sorted(file.name for file in path.iterdir()) for path in folder.glob("*export*")}
    assert exports == {"export": ["config.json", "model.onnx", "model.safetensors"], "export384": WRITTEN}
    assert read_class_names(str(folder / "export")) == tuple(NAMES)
    assert json.loads((folder / "export" / "config.json").read_text())["label_names"] == NAMES
    properties = onnx.load(folder / "export" / "model.onnx").metadata_props
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    assert {each.key: json.loads(each.value) for each in properties} == {
        "classes": NAMES,
        "mean": mean,
        "std": std,
    }
    assert read_statistics(str(folder / "export")) == (tuple(mean), tuple(std))
    best = load_file(folder / "export" / "model.safetensors")["fc.weight"]
    assert torch.equal(load_file(folder / "averaged" / "model.safetensors")["fc.weight"], 2 * best)


@pytest.mark.parametrize("program", blocks("python"), ids=["timm", "onnxruntime"])
def test_a_program_of_the_document_runs(program: str, folder: Path) -> None:
    names: dict[str, object] = {}
    exec(adapted(program, folder), names)
    assert "prepare" in names or names["logits"].shape == (5, 10)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one-line error message of an export that is refused."""
    capsys.readouterr()
    assert export.main([str(argument) for argument in arguments]) == export.MISTAKE
    printed = capsys.readouterr()
    assert not printed.out
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    return lines[0]


def test_an_export_is_replaced_only_with_force(demo_run: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "export"
    assert export.main([str(demo_run), str(folder)]) == export.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "evaluated by the class token alone: the auxiliary head was never trained" in lines[0]
    difference = re.fullmatch(r"timm: outputs differ by (\S+) at most", lines[2])
    assert difference is not None
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
    assert "holds files that are not of an export (notes.txt)" in refused(capsys, demo_run, folder, "--force")


def test_an_lvvit_is_exported_with_a_warning_that_timm_lacks_it(tmp_path: Path, capsys) -> None:
    source = run_folder(tmp_path / "run", "lvvit_t", 32)
    assert export.main([str(source), str(tmp_path / "export")]) == export.DONE
    assert "timm has no lvvit_t" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/nowhere", "--model", "volo_demo"], "There are no weights at"),
        (["{weights}"], "that names the model of the weights in"),
        (["{run}", "--model", "volo_dmeo"], "Did you mean volo_demo?"),
        (["{run}", "--img-size", "65"], "--img-size must be a multiple of 16"),
        (["{run}", "--use-ema"], "There are no averaged weights (EMA) in"),
    ],
)
def test_a_mistake_is_one_message(arguments, message, demo_run: Path, tmp_path: Path, capsys) -> None:
    weights = tmp_path / "weights.pt"
    torch.save({"head.bias": torch.zeros(3)}, weights)
    source, *flags = (argument.format(run=demo_run, weights=weights) for argument in arguments)
    assert message in refused(capsys, source, tmp_path / "export", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_a_folder_that_cannot_be_created_is_one_message(demo_run: Path, capsys) -> None:
    export.main([str(demo_run), "/dev/null/export"])
    assert "cannot export to /dev/null/export" in capsys.readouterr().err


def test_missing_packages_are_found_before_anything_is_read(demo_run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None)
    assert "--onnx needs onnx and onnxscript." in refused(capsys, demo_run, tmp_path / "export", "--onnx")


@pytest.mark.parametrize("difference", [2e-5, float("nan")])
def test_different_logits_are_an_error_and_nothing_is_written(
    difference: float, demo_run: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timm_export, "timm_difference", lambda trained, folder: difference)
    assert export.main([str(demo_run), str(tmp_path / "export")]) == export.DIFFERS
    assert f"error: timm gives outputs that differ by {difference:.1e}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
