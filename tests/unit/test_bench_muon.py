"""The comparison of Muon with AdamW gives both sides equal settings and trials; the cost counts all work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coded_images import smooth, write_images

from horovod_volo.bench import comparison
from horovod_volo.bench.machine import muon, muon_learning
from horovod_volo.config.command_line import parse
from horovod_volo.core.errors import UserError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    named = {
        f"{split}/{name}/{name}.png": smooth(32, 32, seed=0) for split in ("train", "val") for name in "ab"
    }
    write_images(tmp_path / "images", named)
    return tmp_path / "images"


def test_both_sides_have_the_same_settings_and_trials(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW is best at 0.001 here, Muon at 0.002; the seeds are trained at these."""
    commands: list[list[str]] = []

    def run_once(command: list[str], folder: Path) -> float:
        commands.append(command)
        config = parse(command[3:]).config
        update = config.update
        best = {"adamw": 1e-3, "muon": 2e-3}[update.opt]
        top1 = 50.0 + (update.lr == best) + 10 * (update.opt == "muon") + config.run.seed
        folder.mkdir(parents=True)
        records = [
            {"step": 1, "epoch": 1.0, "loss": 3.0, "lr": 0.1},
            {"step": 1, "epoch": 1.0, "top1": 20.0, "loss": 2.0},
            {"step": 2, "epoch": 2.0, "loss": 2.0, "lr": 0.1},
            {"step": 2, "epoch": 2.0, "top1": top1, "loss": 1.0},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 60.0

    monkeypatch.setattr(muon_learning, "run_once", run_once)
    result = muon_learning.measure(
        data_dir=str(images),
        rates=(1e-3, 2e-3),
        seeds=(1, 2),
        output=str(tmp_path / "runs"),
        batch_size=2,
        epochs=2,
    )
    configs = [parse(command[3:]).config for command in commands]
    of_side = {
        opt: [(c.update.lr, c.run.seed) for c in configs if c.update.opt == opt] for opt in ("adamw", "muon")
    }
    assert of_side == {
        "adamw": [(1e-3, 0), (2e-3, 0), (1e-3, 1), (1e-3, 2)],
        "muon": [(1e-3, 0), (2e-3, 0), (2e-3, 1), (2e-3, 2)],
    }
    for one, other in zip(configs[:2], configs[4:6], strict=True):
        assert one.data == other.data
        assert one.objective == other.objective
        assert one.update.epochs + one.update.cooldown_epochs == 2
    figures = {figure.label: figure.value for figure in result.figures}
    assert figures["Muon at 0.002: top-1 after epoch 1"] == 20.0
    assert figures["Muon at 0.002: top-1 after epoch 2"] == 62.5
    assert figures["AdamW: top-1 at 0.002, one run"] == 50.0
    assert figures["Muon: top-1 above AdamW's"] == pytest.approx(10.0)


@pytest.mark.parametrize("seeds", [(1,), (1, 1), (0, 1)])
def test_seeds_are_several_and_not_that_of_the_rates(images: Path, seeds: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="two or more, each once, and not 0"):
        muon_learning.measure(data_dir=str(images), seeds=seeds)


def test_the_cost_of_an_update_is_measured_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    with comparison.one_thread():  # which restores the number of threads
        result = muon.measure(model="volo_demo", pairs=2)
    figures = {figure.label: figure.value for figure in result.figures}
    assert result.name == "muon volo_demo 1 rank"
    assert figures["operations of all matrices"] == figures["operations of the busiest rank"] > 1
    assert figures["time relative to AdamW's"] > 1
    assert figures["message of all updates"] == pytest.approx(4 * 0.52e6 / 2**20, rel=0.05)
