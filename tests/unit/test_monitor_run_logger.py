"""The files of a run: one JSON object per line, TensorBoard events, and no records after the resumed step."""

import json
import shutil
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import mounted_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horovod_volo.engine.checkpoint.files import CHECKPOINTS, clean_up
from horovod_volo.engine.log_point import log_own_times
from horovod_volo.monitor.charts import Board
from horovod_volo.monitor.logger import EVALUATION, METRICS, TRAIN, AppendedFile, drop_records_after
from horovod_volo.monitor.meters import OwnTime, StragglerFinder
from horovod_volo.monitor.progress import RunLength
from horovod_volo.monitor.run_logger import RunLogger

VALUES: dict[str, float | int] = {
    "epoch": 0,
    "images_seen": 64,
    "loss": 2.5,
    "lr": 1e-3,
    "images_per_second": 100.0,
    "data_wait": 0.25,
}
SCORES: dict[str, float | int] = {"epoch": 0, "top1": 12.5, "images": 8}


def train(logger: RunLogger, *steps: int, **changed: float) -> None:
    for step in steps:
        logger.log_training(step, VALUES | changed)


def resumed(folder: Path, first_step: int) -> RunLogger:
    """Open the logger of a resumed run, in another second: TensorBoard sorts files of one second as text."""
    time.sleep(1 - time.time() % 1)
    return RunLogger(folder, RunLength(first_step, 10, 10, 1))


def metrics(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(folder: Path, name: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder))
    board.Reload()
    if name not in board.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_log_points_and_evaluations_are_lines_of_json_and_events(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path / "runs" / "one", RunLength(0, 100, 10, 1))
    train(logger, 1, 2)
    logger.log_evaluation(2, SCORES)
    # Before the logger is closed:
    found, losses = metrics(tmp_path / "runs" / "one"), events(tmp_path / "runs" / "one", "train/loss")
    logger.close()
    assert found == [{"step": 1, **VALUES}, {"step": 2, **VALUES}, {"step": 2, **SCORES}]
    assert [list(record) for record in found[1:]] == [["step", *VALUES], ["step", *SCORES]]
    assert losses == [(1, 2.5), (2, 2.5)]
    assert events(tmp_path / "runs" / "one", "evaluation/top1") == [(2, 12.5)]
    assert events(tmp_path / "runs" / "one", "train/top1") == []
    assert events(tmp_path / "runs" / "one", "speed/images_per_second") == [(1, 100.0), (2, 100.0)]


def test_the_times_of_all_ranks_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = RunLogger(tmp_path, RunLength(0, 100, 10, 1))
    hosts = [f"node{rank // 8}" for rank in range(100)]
    progress, state = SimpleNamespace(stragglers=StragglerFinder(hosts)), SimpleNamespace(step=5)
    derived = SimpleNamespace(steps_per_epoch=100)
    context = SimpleNamespace(logger=logger, progress=progress, state=state, derived=derived)
    append, written = AppendedFile.append, list[int]()

    def counted(file: AppendedFile, content: bytes) -> None:
        written.append(len(content))
        append(file, content)

    monkeypatch.setattr(AppendedFile, "append", counted)
    log_own_times(context, [OwnTime(rank / 8, rank / 16) for rank in range(100)])  # type: ignore[arg-type]
    assert len(written) == 1
    for rank in (0, 50, 99):
        assert events(tmp_path, f"rank seconds/{rank:03}_{hosts[rank]}") == [(5, rank / 8)]
        assert events(tmp_path, f"rank data/{rank:03}_{hosts[rank]}") == [(5, rank / 16)]


def test_a_process_that_is_taken_over_while_it_appends_writes_into_the_file_of_before(tmp_path: Path) -> None:
    late, checks = AppendedFile(tmp_path / "log.txt"), list[bool]()
    late.append(b"a line that is written in pa")

    def taken_over() -> None:
        checks.append(True)
        if len(checks) == 2:  # the process was stopped after this check
            AppendedFile(late.path).renew()

    late._may_write = taken_over
    late.append(b"rt\n")
    assert late.path.read_bytes() == b"a line that is written in pa\n"


def test_a_process_that_is_taken_over_while_it_replaces_a_file_does_not(tmp_path: Path) -> None:
    kept = tmp_path / METRICS
    kept.write_text('{"step": 1}\n{"step": 2}\n')
    with pytest.raises(FileNotFoundError):  # the process was stopped after its check
        drop_records_after(kept, 1, lambda: clean_up(tmp_path / CHECKPOINTS))
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2]


def test_a_resume_drops_later_records(tmp_path: Path) -> None:
    first = RunLogger(tmp_path, RunLength(0, 10, 10, 1))
    train(first, 1, 2, loss=1.0)
    first.log_evaluation(2, SCORES)
    train(first, 3, 4, loss=1.0)
    first.log_evaluation(4, SCORES)
    first.close()
    second = resumed(tmp_path, 2)
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 2]
    train(second, 3, loss=2.0)
    second.close()
    found = [(record["step"], record.get("loss")) for record in metrics(tmp_path)]
    assert found == [(1, 1.0), (2, 1.0), (2, None), (3, 2.0)]
    assert events(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert events(tmp_path, "evaluation/top1") == [(2, 12.5)]


@pytest.mark.parametrize(
    "cut", ['{"step": 2, "loss"', "2", "{}", '{"step": null}', "\x00", "[1]", "\udcff", ""]
)
def test_a_last_line_that_was_written_in_part_is_dropped(cut: str, tmp_path: Path) -> None:
    content = '{"step": 1, "loss": 1.0}\n' + cut
    (tmp_path / "metrics.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    logger = RunLogger(tmp_path, RunLength(5, 10, 10, 1))
    train(logger, 6)
    logger.close()
    assert [record["step"] for record in metrics(tmp_path)] == [1, 6]


def test_a_last_line_without_a_line_feed_is_kept_and_what_is_repeated_counts_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "top1": 3.0}\n{"step": 2}')
    RunLogger(tmp_path, RunLength(5, 10, 10, 1)).close()
    assert metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_the_log_file_has_the_text_of_the_terminal(tmp_path, capsys):
    for number in (1, 2):
        logger = RunLogger(tmp_path, RunLength(number, 10, 10, 1))
        logger.log(f"run {number}", "of Größe")
        train(logger, number + 1)
        logger.close()
    shown = capsys.readouterr().out
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == shown
    lines = [line for line in shown.splitlines() if not line.startswith("step ")]
    assert lines == ["run 1", "of Größe", "run 2", "of Größe"]


def test_nothing_is_lost_on_a_disk_that_was_full(tmp_path, capsys):
    with mounted_disk(tmp_path / "small", "256k") as disk:
        logger = RunLogger(disk, RunLength(0, 100, 10, 1))
        train(logger, 1)
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(bytes(2**20))
        for _ in range(2):
            logger.log("x" * 10_000)
        train(logger, 2, 3)
        ballast.unlink()
        logger.log("at last")
        train(logger, 4)
        logger.close()
        assert [record["step"] for record in metrics(disk)] == [1, 2, 3, 4]
        assert [step for step, _ in events(disk, "train/loss")] == [1, 2, 3, 4]
        log = (disk / "log.txt").read_text().splitlines()
    assert [len(line) for line in log if line[0] == "x"] == [10_000, 10_000]
    assert len(log) == 7
    shown = capsys.readouterr().out
    assert shown.count("cannot be written: No space left on device. Training goes on.") == 1
    assert shown.count("can be written again, and lack nothing") == 1


def test_a_line_that_was_written_in_part_is_ended(tmp_path: Path) -> None:
    """As by a run that was killed while the disk was full."""
    (tmp_path / "log.txt").write_text("step 7/1")
    with closing(RunLogger(tmp_path, RunLength(0, 100, 10, 1))) as logger:
        logger.log("resumed")
    assert (tmp_path / "log.txt").read_text() == "step 7/1\nresumed\n"


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_folder_that_was_removed_is_made_again(comes_back, tmp_path, capsys):
    folder = tmp_path / "run"
    logger = RunLogger(folder, RunLength(0, 100, 10, 1))
    train(logger, 1)
    shutil.rmtree(folder)
    folder.write_text("a file in its place")
    train(logger, 2)
    logger.write_file("resolved.toml", "something")
    if comes_back:
        folder.unlink()
        train(logger, 3)
    logger.close()
    shown = capsys.readouterr().out
    assert shown.count("Training goes on.") == 1
    assert "resolved.toml is not written" in shown
    assert ("log.txt lacks its last" in shown) != comes_back
    if comes_back:
        assert [record["step"] for record in metrics(folder)] == [2, 3]
        assert [step for step, _ in events(folder, "train/loss")] == [2, 3]


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
    damaged, evaluated = {**POINT, "bad_samples": 1}, {"images": 9, "top1": 1}
    earlier = [{"step": 1, **POINT}, {"step": 2, **damaged}, {"step": 2, **evaluated}]
    assert "bad_samples" in Board(earlier).select(TRAIN, POINT)
    assert "images" not in Board(earlier).select(EVALUATION, {"images": 9})
