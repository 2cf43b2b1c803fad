"""The comparison with timm's train.py: runs are read right, and both sides get the same recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coded_images import smooth, write_images

from horovod_volo.bench.machine.learning import (
    Budget,
    RunResult,
    mean_difference,
    measure,
    our_command,
    read_ours,
    read_timm,
    t_quantile,
    timm_command,
)
from horovod_volo.config.command_line import parse
from horovod_volo.core.errors import UserError

BUDGET = Budget("images", 10, 3 * 640, 64, 64, 3, 2e-3)


def ours(**others: object) -> dict[str, object]:
    """Return a line of metrics.jsonl at a log point of training."""
    return {"class_loss": 0.0, "token_loss": 0.0, "lr": 0.001, "images_per_second": 1.0} | others


def test_our_metrics_are_read(tmp_path: Path) -> None:
    records = [
        ours(step=4, epoch=0.4, loss=9.0),
        ours(step=10, epoch=1, loss=8.0),
        {"step": 10, "epoch": 1, "top1": 10.0, "top5": 50.0, "loss": 2.5, "images": 20},
        ours(step=20, epoch=2, loss=7.0),
        {"step": 20, "epoch": 2, "top1": 45.0, "top5": 50.0, "loss": 2.25, "images": 20},
        ours(step=24, epoch=2.4, loss=3.0),  # the mean of 4 steps
        ours(step=30, epoch=3, loss=2.0),  # of 6
        {"step": 30, "epoch": 3, "top1": 40.0, "top5": 50.0, "loss": 2.125, "images": 20},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    # The last epoch counts, not the best one.
    assert read_ours(tmp_path, 120.0, BUDGET) == RunResult(40.0, 2.125, pytest.approx(2.4), 16.0, 2.0)


def test_timms_summary_is_read(tmp_path: Path) -> None:
    lines = ["epoch,train_loss,eval_loss,eval_top1,eval_top5,lr", "0,2.5,2.25,20.5,70.0,0.002"]
    lines += ["1,2.25,2.125,45.0,72.0,0.001", "2,2.125,2.0,40.5,75.0,1e-05"]
    (tmp_path / "summary.csv").write_text("\n".join(lines) + "\n")
    assert read_timm(tmp_path, 60.0, BUDGET) == RunResult(40.5, 2.0, 2.125, 32.0, 1.0)


def test_a_run_that_ended_early_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n0,2,2,20,70,0\n"
    )
    with pytest.raises(RuntimeError, match="results of 1 epochs, not of 3"):
        read_timm(tmp_path, 60.0, BUDGET)


def test_both_sides_get_one_recipe() -> None:
    theirs = timm_command(BUDGET, "checkout", 7, Path("out") / "timm_seed7")
    config = parse(our_command(BUDGET, 7, Path("out") / "ours_seed7", "")[3:]).config
    said = {flag: theirs[place + 1] for place, flag in enumerate(theirs) if flag.startswith("-")}
    assert float(said["--lr"]) == config.update.lr == 2e-3
    assert float(said["--min-lr"]) == config.update.min_lr
    assert float(said["--warmup-lr"]) == config.update.warmup_lr
    assert int(said["--warmup-epochs"]) == config.update.warmup_epochs == 1
    assert int(said["--epochs"]) == config.update.epochs + config.update.cooldown_epochs == 3
    assert float(said["--weight-decay"]) == config.update.weight_decay
    assert float(said["--clip-grad"]) == config.update.clip_grad
    assert said["--opt"] == config.update.opt
    assert ("--sched-on-updates" in theirs) == (config.update.lr_changes == "step")
    assert float(said["--smoothing"]) == config.objective.smoothing
    assert said["--aa"] == config.data.aa
    assert float(said["--reprob"]) == config.data.reprob
    assert float(said["--crop-pct"]) == config.data.crop_pct
    assert theirs[theirs.index("--scale") + 1 :][:2] == [str(end) for end in config.data.scale]
    assert int(said["-b"]) == config.data.batch_size
    assert int(said["--seed"]) == config.run.seed == 7
    assert not config.objective.mix_token  # timm's loop has none
    assert not config.objective.token_label


def test_token_labels_are_all_that_a_labelled_run_adds() -> None:
    plain = our_command(BUDGET, 1, Path("run"), "")
    labelled = our_command(BUDGET, 1, Path("run"), "store")
    assert [word for word in labelled if word not in plain] == [
        "--token-label",
        "--token-label-data",
        str(Path("store").resolve()),
        "--ground-truth",
    ]


@pytest.mark.parametrize(
    ("freedom", "tabulated"), [(1, 12.706), (2, 4.303), (4, 2.776), (8, 2.306), (30, 2.042)]
)
def test_students_t_is_that_of_the_tables(freedom: int, tabulated: float) -> None:
    assert t_quantile(freedom) == pytest.approx(tabulated, abs=6e-4)


def test_means_have_students_interval() -> None:
    found = mean_difference([1.0, 2.0, 3.0, 4.0, 5.0])  # standard error sqrt(2.5 / 5)
    assert found.value == 3.0
    assert found.high - 3.0 == pytest.approx(3.0 - found.low) == pytest.approx(2.776 * 0.5**0.5, abs=1e-3)


def test_equal_spreads_make_welchs_interval_the_plain_one() -> None:
    found = mean_difference([1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert found.value == pytest.approx(1.0)
    assert found.high - found.value == pytest.approx(2.306 * 1.0, abs=1e-3)  # 8 degrees of freedom


def test_a_difference_without_spread_is_certain() -> None:
    found = mean_difference([2.0, 2.0], [1.0, 1.0])
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    images = {
        f"{split}/{name}/{name}.png": smooth(32, 32, seed=0) for split in ("train", "val") for name in "ab"
    }
    write_images(tmp_path / "images", images)
    (tmp_path / "timm").mkdir()
    request = {
        "data_dir": str(tmp_path / "images"),
        "timm": str(tmp_path / "timm"),
        "token_label_data": "",
        "seeds": [1, 2],
        "output": str(tmp_path / "runs"),
        "img_size": 32,
        "batch_size": 4,
        "epochs": 1,
        "lr": 1e-3,
    }
    with pytest.raises(UserError, match=r"no train\.py in .*checkout of huggingface"):
        measure(**request)
    (tmp_path / "timm" / "train.py").touch()
    with pytest.raises(UserError, match=r"2 training images\. Use --batch-size 2 or less"):
        measure(**request)
    with pytest.raises(UserError, match="one run has no spread"):
        measure(**request | {"seeds": [1]})
    with pytest.raises(UserError, match="nowhere"):
        measure(**request | {"data_dir": str(tmp_path / "nowhere")})
