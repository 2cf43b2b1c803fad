"""The Python examples of docs/python.md run as they are, on a few images instead of the paths in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks, text_of

EXAMPLES = [block.code for block in blocks(text_of("docs/python.md")) if block.language == "python"]
# Smaller images.
SMALLER = {
    "epochs=3": "epochs=1, img_size=32, batch_size=8",
    'recipe="demo"': 'recipe="demo", img_size=32',
    '"recipe": "demo"': '"recipe": "demo", "img_size": 32',
}


def log_of(names: dict[str, Any]) -> str:
    return str((names["result"].folder / "log.txt").read_text())


# By a part of each example: what is true of its variables, and of what it prints, after it has run.
EXPECTED: dict[str, Callable[[dict[str, Any], str], object]] = {
    "result.best": lambda names, _: names["result"].finished and names["result"].best["images"] == 20,
    "by_recipe": lambda names, _: names["trainer"].folder == Path("runs/shorter"),
    "trainer.predict": lambda _, printed: (
        re.search(r"^\w+: \d+ %$", printed, re.M) and Path("exported/model.safetensors").is_file()
    ),
    "StopAtAccuracy": lambda names, _: (
        "531,484 parameters, 4 steps on 1 ranks" in log_of(names)
        and re.search(r"^(finished|stopped) at step \d$", log_of(names), re.M)
    ),
}


@pytest.mark.parametrize("part", EXPECTED)
def test_an_example(
    part: str,
    demo_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(EXAMPLES) == len(EXPECTED)
    (code,) = [code for code in EXAMPLES if part in code]
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    photo = sorted((demo_set / "val").rglob("*.jpg"))[0]
    code = code.replace("/path/to/images", str(demo_set)).replace("/path/to/photo.jpg", str(photo))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"docs/python.md, {part}", "exec"), names)
    assert EXPECTED[part](names, capsys.readouterr().out)
