"""Training goes on while a checkpoint is written; what is written is the state of the step that saved it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.engine import loop
from horovod_volo.engine.checkpoint import saving
from horovod_volo.engine.checkpoint.files import CheckpointWriter, find_checkpoint, read_tensors
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup

STEPS = 5  # of an epoch


@pytest.fixture
def context(tmp_path: Path) -> Iterator[TrainContext]:
    """Return a run of one epoch that saves after its second and after its last step."""
    config = small_run(tmp_path, train=4 * STEPS, checkpoint_every=2)
    built, _ = setup(config, World.single(), StopRequest())
    yield built
    built.close()


def saved_steps(context: TrainContext) -> list[str]:
    return sorted(path.name for path in (context.folder / "checkpoints").glob("step_*"))


def test_steps_go_on_and_do_not_change_what_is_written(
    context: TrainContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, write = threading.Event(), saving.write_checkpoint
    began: list[int] = []

    def write_later(folder: Path, step: int, *arguments: Any, **named: Any) -> Path:
        began.append(step)
        assert step != 2 or release.wait(timeout=60)
        return write(folder, step, *arguments, **named)

    weights: dict[int, torch.Tensor] = {}
    take_step = loop.train_step

    def observed_step(*arguments: Any) -> None:
        take_step(*arguments)
        weights[context.state.step] = context.state.model.head.weight.detach().clone()
        if context.state.step == 3:
            assert began == [2]
            assert saved_steps(context) == []
            release.set()

    monkeypatch.setattr(saving, "write_checkpoint", write_later)
    monkeypatch.setattr(loop, "train_step", observed_step)
    assert loop.fit(context)
    assert began == [2, 4, 5]
    assert saved_steps(context) == ["step_00000002", "step_00000004", "step_00000005"]
    for step in began:
        path = find_checkpoint(str(context.folder / "checkpoints" / f"step_{step:08}"))
        assert torch.equal(read_tensors(path)["model"]["head.weight"], weights[step])
    assert (context.folder / "checkpoints" / "best" / "evaluation.json").exists()


def test_a_step_that_is_due_twice_is_saved_once(
    context: TrainContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []
    begin = CheckpointWriter.begin

    def counted(self: CheckpointWriter, *arguments: Any) -> None:
        began.append(context.state.step)
        begin(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "begin", counted)
    context.config = replace(context.config, run=replace(context.config.run, checkpoint_every=STEPS))
    assert loop.fit(context)
    assert began == [STEPS]


def test_a_failure_ends_the_run_at_the_next_log_point(
    context: TrainContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_: Any, **named: Any) -> Path:
        failed.set()
        raise UserError("the disk is full")

    take_step = loop.train_step

    def step_after_failure(*arguments: Any) -> None:
        if context.state.step == 2:
            assert failed.wait(timeout=60)
            with pytest.raises(UserError):
                context.checkpoints._writing.result(timeout=60)  # type: ignore[union-attr]
        take_step(*arguments)

    monkeypatch.setattr(saving, "write_checkpoint", fail)
    monkeypatch.setattr(loop, "train_step", step_after_failure)
    with pytest.raises(UserError, match="the disk is full"):
        loop.fit(context)
    assert context.state.step == 3


def test_buffers_are_used_again() -> None:
    writer, weight, found = CheckpointWriter(), torch.zeros(3), []
    for number in range(3):
        weight.fill_(number)
        writer.begin({"model": {"weight": weight}}, lambda copies: found.append(copies["model"]["weight"]))
        writer.wait()
        assert found[-1].tolist() == [number] * 3
    writer.close()
    assert len({copy.data_ptr() for copy in found}) == 1


def test_a_slow_disk_is_no_hang(context: TrainContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is written and everybody waits for it, the heartbeat goes on."""
    monkeypatch.setattr(saving, "_BEAT_SECONDS", 0.02)
    release, beats = threading.Event(), 0

    def beat(step: int) -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            release.set()

    context.checkpoints.begin({}, lambda _: ["done"] if release.wait(timeout=60) else [])
    monkeypatch.setattr(context.heartbeat, "beat", beat)
    saving.finish_checkpoint(context)
    assert beats >= 3
    assert not context.checkpoints.is_writing
