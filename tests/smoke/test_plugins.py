"""The documented plugin, with one entry of each kind, is trained, evaluated and measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launching import environment

ROOT = Path(__file__).parents[2]
CHOSEN = ["--plugin", "my_package.my_module", "--model", "tiny_conv", "--loss", "focal", "--opt", "signum"]
CHOSEN += ["--sched", "square", "--aa", "mine-m9-n2"]


def documented_module() -> str:
    """Return the Python block of docs/plugins.md."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "plugins.md").read_text(), re.M | re.S)
    return str(block)


def write_plugin(folder: Path, source: str) -> None:
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_module.py").write_text(source)


def run_entry_point(folder: Path, entry: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an entry point outside of the checkout; packages in the folder can be imported."""
    return subprocess.run(
        [sys.executable, "-m", f"horovod_volo.{entry}", *arguments],
        cwd=folder,
        env=environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_documented_plugin_trains_is_evaluated_and_measured(demo_set: Path, tmp_path: Path) -> None:
    write_plugin(tmp_path, documented_module())
    recipe = [str(demo_set), "--recipe", "demo", "--no-token-label", "-b", "8", "--log-every", "1", *CHOSEN]

    done = run_entry_point(tmp_path, "train", *recipe, "--name", "mine", "--stop-at-step", "5")
    assert done.returncode == 75, done.stderr
    assert "tiny_conv, 954 parameters" in done.stdout  # (3 * 16 + 1) * 16 + (16 + 1) * 10
    run = tmp_path / "runs" / "mine"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "lr" in record]
    assert len(losses) == 5
    # The focal loss of ten equal probabilities is (1 - 0.1)^2 ln 10.
    assert losses[0] == pytest.approx(1.87, abs=0.3)

    weights = ["--weights", str(run), "--json", "-", "-b", "8"]
    found = run_entry_point(tmp_path, "evaluate", str(demo_set), *weights, "--plugin", "my_package.my_module")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["model"] == "tiny_conv"
    without = run_entry_point(tmp_path, "evaluate", str(demo_set), *weights)
    assert without.returncode == 2
    assert "the model tiny_conv of a plugin. Add --plugin my_package.my_module." in without.stderr

    tiny = ["--model", "tiny_conv", "--img-size", "32", "--batch-size", "2", "--pairs", "2", "--json"]
    measured = run_entry_point(tmp_path, "bench", "step", *tiny, "--plugin", "my_package.my_module")
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout)["name"] == "step tiny_conv 32"
