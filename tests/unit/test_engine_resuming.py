"""Checkpoints of a run: training goes on while one is written, and damaged files are named."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import small_run

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.elastic.ledger import check_ledger
from horovod_volo.engine import loop, run
from horovod_volo.engine.accuracy import CONFUSIONS
from horovod_volo.engine.callbacks import Callbacks, standard_callbacks
from horovod_volo.engine.checkpoint import files, saving
from horovod_volo.engine.checkpoint.files import CHECKPOINTS, find_checkpoint, read_tensors, update_link
from horovod_volo.engine.checkpoint.saving import LONGEST_WRITE_SECONDS, save_evaluation
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.models.pretrained import load_pretrained
from horovod_volo.monitor.logger import METRICS

Start = Callable[..., tuple[TrainContext, list[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that sets up a run of three steps; it saves after each and evaluates at the end."""
    settings: dict[str, Any] = {"checkpoint_every": 1, "keep_checkpoints": 3}
    with ExitStack() as started:

        def set_up(**changes: object) -> tuple[TrainContext, list[str]]:
            started.close()  # only one run at a time has the folder
            config = small_run(tmp_path, **settings | changes)
            context, warnings = setup(config, World.single(), StopRequest())
            started.enter_context(closing(context))
            context.callbacks = Callbacks(standard_callbacks(), context.stop)
            context.callbacks.started(context)
            return context, warnings

        yield set_up


def test_a_damaged_checkpoint_is_named_and_one_that_was_being_replaced_is_found(start: Start) -> None:
    context, _ = start()
    assert loop.fit(context)
    checkpoints = context.folder / "checkpoints"
    (checkpoints / "step_00000003" / "model.safetensors").write_bytes(b"")
    resumed, warnings = start(resume="auto")
    assert resumed.state.step == 2
    (warning,) = (text for text in warnings if "damaged" in text)
    assert warning.startswith(f"{checkpoints / 'step_00000003'} is damaged")
    assert warning.endswith("step 2 is resumed")
    # A run that was killed between the renames of a replaced step resumes.
    last = checkpoints / "step_00000003"
    shutil.rmtree(last)
    loop.fit(resumed)
    (last / "evaluation.json").unlink()
    last.rename(checkpoints / ".step_00000003.replaced")  # and then it was killed
    resumed, _ = start(resume="auto")
    assert resumed.state.step == 3
    assert loop.fit(resumed)
    assert (last / "evaluation.json").exists()
    assert not list(checkpoints.glob(".*"))
    assert loop.fit(start(resume="auto", epochs=2)[0])
    fewer, _ = start(resume="auto")  # epochs than are done
    assert (loop.fit(fewer), fewer.state.step) == (True, 6)


def test_links_that_a_killed_run_did_not_update_are_updated(start, monkeypatch) -> None:
    context, _ = start()
    confusions = context.folder / CONFUSIONS
    monkeypatch.setattr(saving, "save_evaluation", lambda *each: (confusions.stat(), save_evaluation(*each)))
    assert loop.fit(context)
    last, best = (context.folder / CHECKPOINTS / name for name in ("last", "best"))
    best.unlink()
    last.unlink()
    last.mkdir()
    with pytest.raises(AllRanksError, match="cannot be written"):
        start(resume="auto")
    last.rmdir()
    update_link(last, last.with_name("step_00000002"))
    resumed, _ = start(resume="auto")
    assert last.resolve().name == "step_00000003"
    assert loop.fit(resumed)
    assert best.resolve() == last.resolve()


def test_a_checkpoint_that_is_saved_while_a_run_starts_is_not_passed_over(start, tmp_path, monkeypatch):
    """As by a run that was asked to stop, and ends when the next one has chosen the checkpoint before."""
    context, _ = start()
    assert loop.fit(context)
    newest = context.folder / "checkpoints" / "step_00000003"
    newest.rename(unsaved := tmp_path / "unsaved")
    build, save = run.build_state, partial(unsaved.rename, newest)
    monkeypatch.setattr(run, "build_state", lambda *one, **other: (save(), build(*one, **other))[1])
    with pytest.raises(AllRanksError, match=r"step_00000003 was saved while this run was starting"):
        start(resume="auto")
    monkeypatch.undo()
    resumed, _ = start(resume="auto")
    assert resumed.state.step == 3


def test_mean_std_and_crop_travel_with_the_weights(start: Start, tmp_path: Path) -> None:
    own = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.5, 1.0)}
    model: Any = {"name": "volo_demo", "image_side": 32}
    context, _ = start(checkpoint_every=3, crop_pct=0.5, **own)
    assert loop.fit(context)
    loaded = load_pretrained(str(context.folder), **model)
    assert (loaded.mean, loaded.std) == tuple(own.values())
    weights = next((context.folder / "checkpoints").glob("step_*/model.safetensors"))
    alone = tmp_path / "alone.safetensors"  # without the settings of its run
    shutil.copy(weights, alone)
    copied = load_pretrained(str(alone), **model, std=own["std"])
    assert (copied.mean, copied.crop_mode, copied.crop_pct) == (own["mean"], "center", 0.5)
    (of_timm := tmp_path / "of_timm").mkdir()
    save_file(load_file(alone), of_timm / "model.safetensors")  # without a header
    timms = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_mode": "squash", "crop_pct": 0.7}
    (of_timm / "config.json").write_text(json.dumps({"pretrained_cfg": timms}))
    hub = load_pretrained(str(of_timm), **model)
    assert (hub.mean, hub.std, hub.crop_mode, hub.crop_pct) == ((0.1,) * 3, (0.2,) * 3, "squash", 0.7)
    with pytest.raises(UserError, match=r"was trained with --mean 0\.5 0\.4 0\.3 --std"):
        load_pretrained(str(context.folder), **model, mean=(0.5, 0.5, 0.5))
    with pytest.raises(AllRanksError, match=r"has mean and std --mean 0\.5 0\.4 0\.3 .* this run has of the"):
        start(resume="auto")
    with pytest.raises(AllRanksError, match=r"--std 0\.25 0\.5 0\.5, .* Give --mean 0\.5 0\.4 0\.3"):
        start(resume="auto", mean=own["mean"], std=(0.25, 0.5, 0.5))
    start(resume="auto", crop_pct=0.5, **own)
    _, warnings = start(name="other", finetune=str(alone))
    assert any("trained with --mean 0.5 0.4 0.3" in text for text in warnings), warnings


def goes_on_as_a_whole_run(start: Start, **settings: Any) -> TrainContext:
    """Resume a stopped run, and assert that it ends with the state of one that is not stopped."""
    context, _ = start(resume="auto", **settings)
    assert loop.fit(context)
    whole, _ = start(name="whole", **settings)
    assert loop.fit(whole)
    states = (each.state.replicated_tensors() for each in (context, whole))
    assert all(torch.equal(*both) for both in zip(*states, strict=True))
    return context


def test_images_grow_from_where_they_were(start: Start) -> None:
    growing = {"first_size": 16, "full_size_after": 0.5, "mix_token": True, "token_label": True}
    context, _ = start(**growing, stop_at_step=1)
    assert not loop.fit(context)
    assert context.learner.side(1) == 16
    assert "model_tflops" not in (context.folder / METRICS).read_text()
    with pytest.raises(AllRanksError, match=r"Give --first-size 16 --full-size-after 0\.5, or start"):
        start(resume="auto", **growing | {"full_size_after": 0.3})
    assert goes_on_as_a_whole_run(start, **growing).learner.side(3) == 32
    assert "model_tflops" in (context.folder / METRICS).read_text()


@pytest.mark.parametrize("plan", [{"balance": 1.0}, {"aug_repeats": 3}], ids=str)
def test_a_run_that_draws_images_again_resumes_its_plan(start: Start, plan: dict[str, Any]) -> None:
    context, warnings = start(**plan, stop_at_step=2)
    assert not any("no effect" in text for text in warnings)
    assert not loop.fit(context)
    again, _ = start(resume="auto", **plan, stop_at_step=2)
    assert not loop.fit(again)  # a run that resumes at the step to stop at stops
    assert again.state.step == 2
    ((name, value),) = plan.items()
    with pytest.raises(AllRanksError, match=rf"has {name} {value}, this run has 0"):
        start(resume="auto")
    context = goes_on_as_a_whole_run(start, **plan)
    with pytest.raises(UserError, match="with --balance or --aug-repeats, images are drawn several times"):
        check_ledger(context.folder)


def test_balancing_equal_classes_is_named(start: Start, tmp_path: Path) -> None:
    make_demo_set(tmp_path / "equal", train=20, val=10)
    _, warnings = start(balance=0.5, data_dir=str(tmp_path / "equal"))
    assert any("--balance has no effect" in text for text in warnings)


def test_a_damaged_evaluation_of_the_best_checkpoint_is_named(start: Start) -> None:
    context, _ = start(checkpoint_every=3)
    assert loop.fit(context)
    checkpoints = context.folder / "checkpoints"
    metrics = json.loads((checkpoints / "best" / "evaluation.json").read_text())
    (checkpoints / "step_00000001").mkdir(parents=True)
    damaged = (b"", b'{"top1": 3', b"[3]", b"{}", b'{"top1": "high"}', b"[" * 100_000)
    for number, content in enumerate(damaged, 1):
        (checkpoints / "step_00000001" / "evaluation.json").write_bytes(content)
        update_link(checkpoints / "best", checkpoints / "step_00000001")
        save_evaluation(context, metrics)
        assert (checkpoints / "best").resolve().name == "step_00000003"
        log = (context.folder / "log.txt").read_text()
        assert log.count("step_00000001/evaluation.json is damaged") == number


def test_a_checkpoint_is_read_for_as_long_as_it_may_be_written(start, monkeypatch):
    """On a slow disk, a limit for the steps would end each restart while it reads the same bytes."""
    context, _ = start()
    assert loop.fit(context)
    heartbeat = context.heartbeat
    monkeypatch.setattr(heartbeat, "_limit", 60.0)
    limits: set[tuple[str, float]] = set()

    open_file = Path.open

    def noting(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parents[1].name == CHECKPOINTS:
            limits.add((heartbeat.read().doing, heartbeat.read().limit))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", noting)
    start(resume="auto")
    start(name="tuned", finetune=str(context.folder / CHECKPOINTS / "last"))
    copying = "loading the state and copying it to all ranks"
    stages = ("looking for a checkpoint", "building the network", copying)
    assert limits == {(f"while {stage}", LONGEST_WRITE_SECONDS) for stage in stages}


@pytest.fixture
def context(start: Start) -> TrainContext:
    """Return a run of four steps that saves after its second one, and after its last for two reasons."""
    return start(train=16, checkpoint_every=2)[0]


def steps_of(context: TrainContext) -> list[str]:
    return sorted(path.name for path in (context.folder / "checkpoints").glob("step_*"))


def test_steps_go_on_and_do_not_change_what_is_written(context, monkeypatch):
    release, write = threading.Event(), files.write_checkpoint
    began: list[int] = []
    buffers = set[int]()

    def write_later(folder: Path, step: int, *arguments: Any, **named: Any) -> Path:
        began.append(step)
        buffers.add(context.checkpoints._copies["model"]["head.weight"].data_ptr())
        assert step != 2 or release.wait(timeout=60)
        return write(folder, step, *arguments, **named)

    weights: dict[int, torch.Tensor] = {}
    take_step = loop.train_step

    def observed_step(*arguments: Any) -> None:
        take_step(*arguments)
        weights[context.state.step] = context.state.model.head.weight.detach().clone()
        if context.state.step == 3:
            assert began == [2]
            assert steps_of(context) == []
            release.set()

    monkeypatch.setattr(files, "write_checkpoint", write_later)
    monkeypatch.setattr(loop, "train_step", observed_step)
    assert loop.fit(context)
    assert began == [2, 4]
    assert len(buffers) == 1
    assert steps_of(context) == ["step_00000002", "step_00000004"]
    for step in began:
        path = find_checkpoint(str(context.folder / "checkpoints" / f"step_{step:08}"))
        assert torch.equal(read_tensors(path)["model"]["head.weight"], weights[step])
    assert (context.folder / "checkpoints" / "best" / "evaluation.json").exists()


def test_a_failure_ends_the_run_at_the_next_log_point(context, monkeypatch):
    take_step = loop.train_step

    def fail(*_: Any, **named: Any) -> Path:
        raise UserError("the disk is full")

    def step_after_failure(*arguments: Any) -> None:
        if context.state.step == 2:
            with pytest.raises(UserError):
                context.checkpoints._writing.result(timeout=60)  # type: ignore[union-attr]
        take_step(*arguments)

    monkeypatch.setattr(files, "write_checkpoint", fail)
    monkeypatch.setattr(loop, "train_step", step_after_failure)
    with pytest.raises(UserError, match="the disk is full"):
        loop.fit(context)
    assert context.state.step == 3


def test_a_slow_disk_is_no_hang(context: TrainContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is written and everybody waits for it, the heartbeat goes on."""
    monkeypatch.setattr(saving, "_BEAT_SECONDS", 0.02)
    release, beats = threading.Event(), list[int]()

    def beat(step: int) -> None:
        beats.append(step)
        if len(beats) == 3:
            release.set()

    context.checkpoints.begin({}, lambda _: ["done"] if release.wait(timeout=60) else [])
    monkeypatch.setattr(context.heartbeat, "beat", beat)
    saving.finish_checkpoint(context)
    assert len(beats) >= 3
    assert not context.checkpoints.is_writing
