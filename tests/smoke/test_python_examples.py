"""The Python examples of docs/python.md run as they are, on a few images instead of the paths in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
# Smaller images.
SMALLER = {
    "epochs=3": "epochs=1, img_size=32, batch_size=8",
    'recipe="demo"': 'recipe="demo", img_size=32',
    '"recipe": "demo"': '"recipe": "demo", "img_size": 32',
}


def run_example(number: int, demo_set: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run an example in a folder; return its variables."""
    code = EXAMPLES[number]
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    photo = sorted((demo_set / "val").rglob("*.jpg"))[0]
    code = code.replace("/path/to/images", str(demo_set)).replace("/path/to/photo.jpg", str(photo))
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"docs/python.md, example {number}", "exec"), names)
    return names


def example_with(text: str) -> int:
    (number,) = [number for number, code in enumerate(EXAMPLES) if text in code]
    return number


def test_every_example_is_run_here() -> None:
    assert len(EXAMPLES) == 6


def test_the_first_example(demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_example(example_with("result.best"), demo_set, tmp_path, monkeypatch)
    assert found["result"].finished
    assert found["result"].best["images"] == 20


def test_a_recipe_and_a_config(demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_example(example_with("by_recipe"), demo_set, tmp_path, monkeypatch)
    assert found["trainer"].folder == Path("runs/shorter")


def test_predictions_and_export(
    demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(example_with("trainer.predict"), demo_set, tmp_path, monkeypatch)
    assert re.search(r"^\w+: \d+ %$", capsys.readouterr().out, re.M)
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_callbacks(demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_example(example_with("StopAtAccuracy"), demo_set, tmp_path, monkeypatch)
    log = (found["result"].folder / "log.txt").read_text()
    assert "531,484 parameters, 4 steps on 1 ranks" in log
    assert re.search(r"^(finished|stopped) at step \d$", log, re.M)


def test_data_sets(demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_example(example_with("class Drawings"), demo_set, tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "drawings" / "checkpoints" / "best").exists()
    assert found["trainer"].config.data.val_share == 0.2


def test_hugging_face(demo_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    found = run_example(example_with("import datasets"), demo_set, tmp_path, monkeypatch)
    assert found["trainer"].evaluate()["images"] == 10
