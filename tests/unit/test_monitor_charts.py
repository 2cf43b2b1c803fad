"""Metrics that say nothing are not charted, and a resumed run goes on where it was."""

from __future__ import annotations

from typing import Any

from horovod_volo.monitor.charts import Board
from horovod_volo.monitor.logger import EVALUATION, TRAIN

POINT: dict[str, Any] = {"loss": 2.0, "token_loss": 0.0, "lr": 0.1, "bad_samples": 0, "skipped_steps": 0}
SHOWN = {"loss": 2.0, "lr": 0.1}


def test_what_says_nothing_is_left_out_until_it_does() -> None:
    board = Board()
    assert board.select(TRAIN, POINT) == SHOWN
    assert board.select(TRAIN, POINT | {"bad_samples": 3})["bad_samples"] == 3
    assert board.select(TRAIN, POINT) == SHOWN | {"bad_samples": 0}
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
