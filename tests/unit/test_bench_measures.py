"""Each benchmark runs at a tiny size, reports its figures, and refuses wrong values; also those of a GPU."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench import comparison, gpu, loader, peers, step
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.cluster.world import RankResources
from horovod_volo.core.errors import UserError

TINY: dict[str, Any] = {"model": "volo_demo", "img_size": 32, "batch_size": 2, "pairs": 3}


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks short, and leave torch's threads as they are."""
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    resources = RankResources(device=torch.device("cpu"), threads=1, binding="test")
    monkeypatch.setattr("horovod_volo.bench.synthetic.rank_resources", lambda world: resources)


def test_a_wrong_loss_is_not_measured(monkeypatch):
    right = peers.F.cross_entropy
    monkeypatch.setattr(peers.F, "cross_entropy", lambda *args, **named: 1.001 * right(*args, **named))
    with pytest.raises(WrongResultError, match="the losses of"):
        peers.measure(**TINY, against=["eager"])


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("peers --pairs 1", "at least 2"),
        ("peer", "Did you mean peers?"),
        ("reduce --model volo_demo", "horovodrun -np 2"),
        ("loader --images 9 --batch-size 1000", "9 images are no batch of 1000. Use --batch-size 9"),
        ("gpu d7 --out /dev/null/out", "The parts are ceilings, d1"),
        ("simulate --fabrics string", "a100-hdr"),
        ("race photos --timm /dev", "/dev has no train.py. Clone huggingface/pytorch-image-models"),
        ("simulate --models volo_demo", "volo_d1"),
    ],
)
def test_a_mistake_is_reported_with_its_remedy(flags, remedy, capsys):
    assert command_line.main(flags.split()) == 2
    assert remedy in capsys.readouterr().err


def test_a_step_is_measured() -> None:
    result = step.measure(**TINY)
    figures = {figure.label: figure.value for figure in result.figures}
    assert list(figures) == ["images a second", "whole step", "first 3 steps"]
    assert figures["images a second"] == pytest.approx(2000 / figures["whole step"])


def test_steps_are_compared_with_those_of_timms_network() -> None:
    result = peers.measure(**TINY, against=["eager", "channels-last"])
    assert all(figure.value > 0 for figure in result.figures)
    assert {"faster than eager", "faster than channels-last"} <= {figure.label for figure in result.figures}


def test_loader_reports_both_rates() -> None:
    result = loader.measure(images=12, img_size=32, batch_size=3, pairs=2)
    names = [figure.label for figure in result.figures]
    assert names == ["images a second", "timm's loader", "faster than timm's loader"]
    assert all(figure.value > 0 for figure in result.figures)


RECORD = '{"command": "python -m horovod_volo.bench peers"}'
STAND_IN = f"""#!/bin/sh
case "$3" in
    broken) echo "a broken bench" >&2; exit 2 ;;
    slow) exec sleep 9 ;;
esac
echo '{RECORD}'
"""


def test_the_commands_of_the_plan_are_understood_and_every_part_takes_less_than_eight_minutes() -> None:
    for lines in gpu.PARTS.values():
        assert sum(limit for limit, _ in lines) <= 480
        assert all(command_line.parse(words.split()) for _, words in lines)


def test_ceilings_of_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_COPIED", 2**12)
    monkeypatch.setattr(gpu, "_PRODUCTS", ((8, 4, 6),))
    monkeypatch.setattr(gpu, "_ATTENTION", {"D1": (1, 2, 4, 8)})
    figures = gpu.measure_ceilings().figures
    kinds = [figure.label.partition(",")[0] for figure in figures]
    assert kinds[:4] == ["copy", *3 * ["8 x 4 x 6"]]
    assert set(kinds[4:]) == {"attention of D1"}  # this device has one of the backends
    assert all(figure.value > 0 for figure in figures)


def test_a_failure_does_not_stop_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu, "PARTS", {"few": [(9, "broken"), (9, "peers"), (0.1, "slow")]})
    with pytest.raises(UserError, match="2 benchmarks failed"):
        gpu.measure(parts=["few"], out=str(tmp_path))
    outcomes = [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert outcomes == ["failed with status 2  broken", "measured  peers", "took too long  slow"]
    assert (tmp_path / "results.jsonl").read_text().splitlines() == [RECORD]
    assert "a broken bench" in (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match="2 benchmarks failed"):  # continues with what is not measured yet
        gpu.measure(parts=["few"], out=str(tmp_path))
    assert "measured" not in capsys.readouterr().out


def test_other_losses_of_compiled_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module) -> None:
        nn.init.zeros_(model.head.weight)

    monkeypatch.setattr("horovod_volo.engine.state.compile_blocks", spoil)
    with pytest.raises(WrongResultError, match="with blocks compiled and without"):
        step.measure(**TINY, compile=True)
