"""The documented plugin, with one entry of each kind, is trained, evaluated and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.documents import blocks, text_of
from tests.smoke.conftest import shell

PLUGIN = "--plugin my_package.my_module"
CHOSEN = f"{PLUGIN} --model tiny_conv --loss focal --opt signum --sched square --aa mine-m9-n2"


def test_the_documented_plugin_trains_is_evaluated_and_measured(demo_set: Path, tmp_path: Path) -> None:
    (module,) = [block.code for block in blocks(text_of("docs/plugins.md")) if block.language == "python"]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "my_module.py").write_text(module)

    recipe = f"{demo_set} --recipe demo --no-token-label -b 8 --log-every 1 {CHOSEN}"
    printed = shell(f"horovod-volo train {recipe} --name mine --stop-at-step 5", tmp_path, status=75)
    assert "tiny_conv, 954 parameters" in printed  # (3 * 16 + 1) * 16 + (16 + 1) * 10
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "lr" in record]
    assert len(losses) == 5
    # The focal loss of ten equal probabilities is (1 - 0.1)^2 ln 10.
    assert losses[0] == pytest.approx(1.87, abs=0.3)

    evaluate = f"horovod-volo evaluate {demo_set} --weights runs/mine -b 8 --json result.json"
    shell(f"{evaluate} {PLUGIN}", tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["model"] == "tiny_conv"
    refused = shell(evaluate, tmp_path, status=2)
    assert "the model tiny_conv of a plugin. Add --plugin my_package.my_module." in refused

    tiny = "--model tiny_conv --img-size 32 --batch-size 2 --pairs 2 --json"
    measured = shell(f"horovod-volo bench step {tiny} {PLUGIN} 2>/dev/null", tmp_path)
    assert json.loads(measured)["name"] == "step tiny_conv 32"
