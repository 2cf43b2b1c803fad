"""Metrics that say nothing are not charted, losses are smoothed, and a resumed run goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.monitor.tags import EVALUATION, TRAIN, RunningMeans, TellingSeries, chart_of

POINT: dict[str, Any] = {"loss": 2.0, "token_loss": 0.0, "lr": 0.1, "bad_samples": 0, "skipped_steps": 0}


def test_what_says_nothing_is_left_out_until_it_does() -> None:
    series = TellingSeries()
    assert series.select(TRAIN, POINT) == {"loss": 2.0, "lr": 0.1}
    assert series.select(TRAIN, POINT | {"bad_samples": 3})["bad_samples"] == 3
    assert series.select(TRAIN, POINT) == {"loss": 2.0, "lr": 0.1, "bad_samples": 0}
    assert series.select(EVALUATION, {"top1": 5.0, "bad_samples": 0}) == {"top1": 5.0}


def test_a_count_that_stays_the_same_is_left_out() -> None:
    series = TellingSeries()
    shown = [series.select(EVALUATION, {"top1": 1.0, "images": images}) for images in (9, 9, 8, 9)]
    assert [point.get("images") for point in shown] == [None, None, 8, 9]


def test_what_restates_the_step_is_left_out() -> None:
    assert TellingSeries().select(TRAIN, {"epoch": 1, "images_seen": 8, "data_wait": 0.1}) == {}


def test_a_resumed_run_shows_what_it_showed() -> None:
    earlier = [
        {"step": 1, **POINT},
        {"step": 2, **POINT, "bad_samples": 1},
        {"step": 2, "images": 9, "top1": 1},
    ]
    assert "bad_samples" in TellingSeries(earlier).select(TRAIN, POINT)
    assert "images" not in TellingSeries(earlier).select(EVALUATION, {"images": 9})


def test_running_means_are_weighted_means_of_all_points_so_far() -> None:
    losses = [4.0, 2.0, 3.0]
    weights = [0.9**age for age in (2, 1, 0)]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    means = RunningMeans()
    for loss in losses:
        found = means.add({"loss": loss, "lr": 0.1, "class_loss": 2 * loss})
    assert found == pytest.approx({"loss_smoothed": expected, "class_loss_smoothed": 2 * expected})
    resumed = RunningMeans([{"step": n, "loss": loss, "lr": 0.1} for n, loss in enumerate(losses[:2])])
    assert resumed.add({"loss": losses[2]}) == pytest.approx({"loss_smoothed": expected})


def test_metrics_have_their_group_in_the_tag() -> None:
    assert chart_of(TRAIN, "time_data").tag == "time/data"
    assert chart_of(TRAIN, "class_loss_smoothed").tag == "train/class_loss_smoothed"
    assert chart_of(TRAIN, "of_a_plugin").tag == "train/of_a_plugin"
    assert chart_of(EVALUATION, "loss").tag == "evaluation/loss"
