"""Metrics that say nothing are not charted, losses are smoothed, and a resumed run goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.monitor.charts import Board
from horovod_volo.monitor.logger import EVALUATION, TRAIN

POINT: dict[str, Any] = {"loss": 2.0, "token_loss": 0.0, "lr": 0.1, "bad_samples": 0, "skipped_steps": 0}
SHOWN = {"loss": 2.0, "lr": 0.1, "loss_smoothed": 2.0}


def test_what_says_nothing_is_left_out_until_it_does() -> None:
    board = Board()
    assert board.select(TRAIN, POINT) == pytest.approx(SHOWN)
    assert board.select(TRAIN, POINT | {"bad_samples": 3})["bad_samples"] == 3
    assert board.select(TRAIN, POINT) == pytest.approx(SHOWN | {"bad_samples": 0})
    shown = [board.select(EVALUATION, {"bad_samples": 0, "images": images}) for images in (9, 9, 8, 9)]
    assert [point.get("images") for point in shown] == [None, None, 8, 9]
    assert board.select(TRAIN, {"epoch": 1, "images_seen": 8, "data_wait": 0.1}) == {}


def test_a_resumed_run_shows_what_it_showed() -> None:
    earlier = [
        {"step": 1, **POINT},
        {"step": 2, **POINT, "bad_samples": 1},
        {"step": 2, "images": 9, "top1": 1},
    ]
    assert "bad_samples" in Board(earlier).select(TRAIN, POINT)
    assert "images" not in Board(earlier).select(EVALUATION, {"images": 9})


def test_running_means_are_weighted_means_of_all_points_so_far() -> None:
    losses = [4.0, 2.0, 3.0]
    weights = [0.9**age for age in (2, 1, 0)]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    board = Board()
    for loss in losses:
        found = board.select(TRAIN, {"loss": loss, "lr": 0.1, "class_loss": 2 * loss})
    assert found["loss_smoothed"] == pytest.approx(expected)
    assert found["class_loss_smoothed"] == pytest.approx(2 * expected)
    resumed = Board([{"step": n, "loss": loss, "lr": 0.1} for n, loss in enumerate(losses[:2])])
    assert resumed.select(TRAIN, {"loss": losses[2]})["loss_smoothed"] == pytest.approx(expected)
