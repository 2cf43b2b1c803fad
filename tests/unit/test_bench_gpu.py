"""What is measured on a GPU, as far as it can be tested without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench import comparison, gpu, step
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.cluster.world import RankResources
from horovod_volo.core.errors import UserError
from horovod_volo.models.registry import COMPILERS

RECORD = '{"command": "python -m horovod_volo.bench loss"}'
STAND_IN = f"""#!/bin/sh
case "$3" in
    broken) echo "a broken bench" >&2; exit 2 ;;
    slow) exec sleep 9 ;;
esac
echo '{RECORD}'
"""
TINY: dict[str, Any] = {
    "model": "volo_demo",
    "img_size": 32,
    "batch_size": 2,
    "precision": "fp32",
    "drop_path": 0.1,
    "pairs": 3,
}


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks short, and leave torch's threads as they are."""
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    resources = RankResources(device=torch.device("cpu"), threads=1, binding="test")
    monkeypatch.setattr("horovod_volo.bench.synthetic.rank_resources", lambda world: resources)


def test_the_commands_of_the_plan_are_understood_and_every_part_takes_less_than_eight_minutes() -> None:
    for lines in gpu.PARTS.values():
        assert sum(limit for limit, _ in lines) <= 480
        assert all(command_line.parse(words.split()) for _, words in lines)


def test_without_a_gpu_nothing_is_done(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="PyTorch sees no GPU here"):
        gpu.measure(parts=["d1"], out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"There is no part d7\. The parts are ceilings, d1"):
        gpu.measure(parts=["d7"], out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_ceilings_of_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_COPIED", 2**12)
    monkeypatch.setattr(gpu, "_PRODUCTS", ((8, 4, 6),))
    monkeypatch.setattr(gpu, "_ATTENTION", {"D1": (1, 2, 4, 8)})
    figures = gpu.measure_ceilings().figures
    kinds = [figure.label.partition(",")[0] for figure in figures]
    assert kinds[:4] == ["copy", *3 * ["8 x 4 x 6"]]
    assert set(kinds[4:]) == {"attention of D1"}  # this device has one of the backends
    assert all(figure.value > 0 for figure in figures)


def test_a_failure_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu, "PARTS", {"few": [(9, "broken"), (9, "loss"), (0.1, "slow")]})
    with pytest.raises(UserError, match="2 benchmarks failed"):
        gpu.measure(parts=["few"], out=str(tmp_path))
    outcomes = [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert outcomes == ["failed with status 2  broken", "measured  loss", "took too long  slow"]
    assert (tmp_path / "results.jsonl").read_text().splitlines() == [RECORD]
    assert "a broken bench" in (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match="2 benchmarks failed"):  # continues with what is not measured yet
        gpu.measure(parts=["few"], out=str(tmp_path))
    assert "measured" not in capsys.readouterr().out


def test_other_losses_of_compiled_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module) -> None:
        nn.init.zeros_(model.head.weight)

    inductor = COMPILERS.find("inductor")
    monkeypatch.setitem(COMPILERS, "inductor", inductor._replace(compile_blocks=spoil))
    with pytest.raises(WrongResultError, match="with blocks compiled and without"):
        step.measure(**TINY, compile=True)
