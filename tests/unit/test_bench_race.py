"""The race to an accuracy: its clock, what it reads of both sides, and its figures."""

from pathlib import Path

import pytest

from horovod_volo.bench.race import TimedScore, figures_of, measure, timm_scores, watched
from horovod_volo.core.errors import UserError
from horovod_volo.demo.demo_set import make_demo_set

OURS = [[TimedScore(10, 50), TimedScore(20, 61), TimedScore(90, 70)], [TimedScore(40, 60)]]
TIMM = [[TimedScore(10, 40), TimedScore(50, 62)], [TimedScore(20, 50), TimedScore(80, 64)]]


def test_a_run_is_timed_from_its_command_to_its_evaluation(tmp_path: Path) -> None:
    make_demo_set(tmp_path / "images", train=20, val=10)
    flags = "--recipe demo --img-size 32 --batch-size 10 --epochs 2 --warmup-epochs 0 --eval-every 1"
    result = measure(str(tmp_path / "images"), target=0, seeds=(1,), ours=flags)
    figures = {each.label: each for each in result.figures}
    assert figures["ours: to 0 %"].value > 0.5  # starting takes longer
    with pytest.raises(UserError, match=r"a run that failed: .* --epochs none"):
        measure(str(tmp_path / "images"), seeds=(1,), ours="--epochs none")
    with pytest.raises(UserError, match="evaluated nothing: true"):
        watched(["true"], list, tmp_path / "run")


def test_the_times_of_both_sides_are_compared_seed_by_seed() -> None:
    figures = {each.label: each.value for each in figures_of({"ours": OURS, "timm": TIMM}, 60)}
    assert figures["ours: to 60 %"] == 30
    assert figures["timm: to 60 %"] == 65
    assert figures["sooner than timm"] == (50 / 20 + 80 / 40) / 2
    assert figures["ours, when timm's run ends"] == (61 + 60) / 2


def test_a_target_that_is_missed_has_no_time() -> None:
    figures = {each.label: each.value for each in figures_of({"ours": OURS, "timm": TIMM}, 61)}
    assert (figures["ours: runs to 61 %"], figures["timm: runs to 61 %"]) == (1, 2)
    assert {"ours: to 61 %", "timm: to 61 %", "sooner than timm"} & figures.keys() == {"timm: to 61 %"}


def test_only_whole_lines_of_timms_summary_are_read(tmp_path: Path) -> None:
    assert timm_scores(tmp_path / "summary.csv") == []
    (tmp_path / "summary.csv").write_text("epoch,train_loss,eval_top1\n0,2.3,21.5\n1,2.1,3")
    assert timm_scores(tmp_path / "summary.csv") == [21.5]
