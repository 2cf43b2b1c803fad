"""tools/export of classifiers: what is written, when it is replaced, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest

from horovod_volo import export
from horovod_volo.models import timm_export
from horovod_volo.models.weights_header import read_class_names, read_statistics
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
    assert "(notes.txt)" in refused(capsys, demo_run, folder, "--force")
    assert export.main([str(demo_run), "/dev/null/export"]) == 2
    assert "cannot export to /dev/null/export" in capsys.readouterr().err


def test_a_network_that_timm_lacks_is_exported(tmp_path: Path, capsys) -> None:
    source = save_run(tmp_path / "run", "lvvit_t", side=32)
    assert export.main([str(source), str(tmp_path / "export")]) == export.DONE
    assert "timm has no lvvit_t" in capsys.readouterr().out


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


def test_different_logits_are_an_error_and_nothing_is_written(
    demo_run: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timm_export, "timm_difference", lambda trained, folder: 2e-5)
    assert export.main([str(demo_run), str(tmp_path / "export")]) == export.DIFFERS
    assert "timm gives outputs that differ by 2.0e-05" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
