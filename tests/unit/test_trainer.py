"""The Python interface in one process: settings, results, signals, callbacks, and trainers in a row."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from schema_examples import words
from test_plugins import MODEL

import horovod_volo
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.registry import MODELS
from horovod_volo.objective.loss import LOSSES
from horovod_volo.train import main
from horovod_volo.trainer import Trainer
from tests.runs import assert_same_tensors

SETTINGS: dict[str, Any] = {"recipe": "demo", "token_label": False, "img_size": 32, "batch_size": 8}
SETTINGS |= {"epochs": 2, "warmup_epochs": 0, "log_every": 5, "eval_every": 1}

PLUGIN = """
from horovod_volo import Callback
from horovod_volo.plugins import register_callback

@register_callback
class LogsItsEnd(Callback):
    def ended(self, run, *, finished):
        run.log(f"seen by a plugin at step {run.step}")
"""


@pytest.fixture(autouse=True)
def one_thread_and_default_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have signals do what they do in a notebook; the sums of several threads may be rounded differently."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class AtStep(Callback):
    """Does something after one step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def step_done(self, run: TrainContext) -> None:
        if run.step == self.step:
            self.action(run)


def test_importing_the_package_and_the_binding_imports_no_heavy_module() -> None:
    """A rank binds itself before it imports torch, which starts threads."""
    code = "import sys, horovod_volo, horovod_volo.cluster.pinning; assert 'Trainer' in dir(horovod_volo); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert all(getattr(horovod_volo, name) for name in horovod_volo.__all__)
    assert not hasattr(horovod_volo, "Trainers")
    assert (Path(horovod_volo.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["data"], {"epoch": 3}, "Did you mean epochs?"),
        (["data"], {"epochs": "3"}, "epochs takes a whole number"),
        (["data"], {"epochs": 0}, "--epochs 0 takes no step"),
        (["data"], {"fit_head": True, "task": "detection"}, "--fit-head is for --task classification"),
        (["data"], {"mixup": 0.2, "mix_token": True}, "--mixup and MixToken"),
        (["data"], {"config": Config()}, "takes a config, or a data folder"),
        (["data"], {"elastic": True, "global_batch": 8, "model": "volo_d1"}, "Drop elastic"),
        ([], {"train": [(b"", 0)]}, "There is no setting 'train'"),
    ],
)
def test_a_mistake_in_the_settings_is_an_error(arguments: list[str], settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Trainer(*arguments, **settings)


def test_a_trainer_does_what_the_command_does(images, tmp_path, monkeypatch) -> None:
    (tmp_path / "logging_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    flags = [word for name, value in SETTINGS.items() for word in words(name, value)]
    where = f"--output {tmp_path} --name command --binding none --plugin logging_plugin"
    assert main([str(images), *flags, *where.split()]) == 0
    trainer = Trainer(images, name="python", output=tmp_path, **SETTINGS)
    result = trainer.fit()

    last = "checkpoints/last/model.safetensors"
    assert_same_tensors(*(load_file(tmp_path / name / last) for name in ("command", "python")))
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("command", "python")]
    assert ["seen by a plugin at step 10\n" in log for log in logs] == [True, False]
    assert (result.finished, result.step, result.folder) == (True, 10, tmp_path / "python")
    assert result.last["images"] == 20
    assert result.best["top1"] >= result.last["top1"]
    assert trainer.evaluate()["top1"] == result.best["top1"]
    assert trainer.evaluate(weights="last")["top1"] == result.last["top1"]
    assert trainer.evaluate(images, split="train")["images"] == 40

    files = sorted((images / "val").rglob("*.jpg"))[:4]
    kinds = [files[0], files[1].read_bytes(), Image.open(files[2]), np.array(Image.open(files[3]))]
    mixed, by_path = trainer.predict(kinds, top=3), trainer.predict(files, top=3)
    assert mixed == by_path
    assert len(mixed) == 4
    assert all(len(classes) == 3 and classes[0][1] >= classes[1][1] for classes in mixed)
    with pytest.raises(UserError, match="is not an image of a known format"):
        trainer.predict([b"no image"])
    exported = trainer.export(tmp_path / "exported")
    own = load_file(trainer.folder / "checkpoints" / "best" / "model.safetensors")
    assert load_file(exported / "model.safetensors").keys() <= own.keys()

    with pytest.raises(UserError, match="already holds a run"):
        Trainer(images, name="python", output=tmp_path, **SETTINGS).fit()
    with pytest.raises(UserError, match="binding differs from that of the first Trainer"):
        Trainer(images, name="other", output=tmp_path, binding="core", **SETTINGS).fit()


def test_a_run_that_ctrl_c_stops_is_saved_and_the_next_call_resumes(images: Path, tmp_path: Path) -> None:
    whole = Trainer(images, name="whole", output=tmp_path, **SETTINGS).fit()
    before = signal.getsignal(signal.SIGINT)

    interrupt = AtStep(3, lambda _: os.kill(os.getpid(), signal.SIGINT))
    trainer = Trainer(images, name="stopped", output=tmp_path, callbacks=[interrupt], **SETTINGS)
    first = trainer.fit()
    assert (first.finished, first.step, first.last) == (False, 4, {})
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = trainer.fit()
    assert (resumed.finished, resumed.step) == (True, 10)
    assert (resumed.last | {"hours": whole.last["hours"]}, resumed.best) == (whole.last, whole.best)


def test_a_second_ctrl_c_interrupts(images: Path, tmp_path: Path) -> None:
    def twice(_: TrainContext) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(images, name="run", output=tmp_path, callbacks=[AtStep(1, twice)], **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert not (trainer.folder / "lock.json").exists()


def test_a_thread_trains_and_a_callback_reads_the_run_and_stops_it(images: Path, tmp_path: Path) -> None:
    """Another thread than the main one cannot handle signals."""
    seen: dict[str, Any] = {}

    def look(run: TrainContext) -> None:
        seen.update(epoch=run.epoch, total=run.total_steps, folder=run.folder, rank=run.world.rank)
        seen.update(parameters=sum(each.numel() for each in run.model.parameters()), name=run.config.run.name)
        run.request_stop()

    settings = SETTINGS | {"stop_at_step": 8}
    trainer = Trainer(images, name="run", output=tmp_path, callbacks=[AtStep(2, look)], **settings)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer.fit()))
    thread.start()
    thread.join()
    assert [(result.finished, result.step) for result in results] == [(False, 3)]
    expected = {"epoch": 0.4, "total": 10, "folder": trainer.folder, "rank": 0, "name": "run"}
    assert seen == expected | {"parameters": 531_484}


def test_an_error_in_a_callback_is_one_error_with_its_cause(images, tmp_path, capsys):
    class Fails(Callback):
        def __init__(self, text: str) -> None:
            self.text = text

        def step_done(self, run: TrainContext) -> None:
            if run.step >= 3:
                raise ZeroDivisionError(self.text)

        def ended(self, run: TrainContext, *, finished: bool) -> None:
            raise AssertionError("must not be called")

    callbacks = [Fails("the first"), Fails("the second")]
    trainer = Trainer(images, name="run", output=tmp_path, callbacks=callbacks, **SETTINGS)
    with pytest.raises(UserError, match="Fails failed in step_done: ZeroDivisionError: the first") as raised:
        trainer.fit()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert (trainer.folder / "checkpoints" / "step_00000004").is_dir()
    printed = capsys.readouterr().err  # both failed in two steps, and are printed once
    assert [printed.count(f"\nZeroDivisionError: the {each}\n") for each in ("first", "second")] == [1, 1]


def test_a_run_that_could_not_be_built_leaves_its_folder_free(images, tmp_path, monkeypatch):
    """As in a notebook, where the loss of a plugin is corrected and `fit` is called again."""
    build, mistakes = LOSSES.find(Config().objective.loss), [ValueError("a mistake")]

    def build_at_second_try(*settings: Any) -> Any:
        if mistakes:
            raise mistakes.pop()
        return build(*settings)

    monkeypatch.setitem(LOSSES, "built_at_second_try", build_at_second_try)
    settings = SETTINGS | {"loss": "built_at_second_try", "stop_at_step": 1}
    trainer = Trainer(images, name="run", output=tmp_path, **settings)
    with pytest.raises(ValueError, match="a mistake"):
        trainer.fit()
    assert not (trainer.folder / "lock.json").exists()
    assert trainer.fit().step == 1


def test_what_is_resumed_is_resumed_again_after_an_error(images: Path, tmp_path: Path) -> None:
    taken, settings = list[TrainContext](), SETTINGS | {"output": tmp_path, "stop_at_step": 1}
    first = Trainer(images, name="first", **settings)
    first.fit()
    settings["callbacks"] = [AtStep(1, taken.append)]
    second = Trainer(images, name="second", resume=first.folder, **settings)
    fails = patch("horovod_volo.engine.run.fit", side_effect=ZeroDivisionError)
    with fails, pytest.raises(ZeroDivisionError):
        second.fit()
    assert second.fit().step == 1
    assert not taken


@pytest.mark.parametrize(("task", "score"), [("segmentation", "miou"), ("detection", "ap50")])
def test_networks_for_pixels_and_boxes_are_evaluated_as_in_training(task, score, tmp_path):
    make_scene_set(tmp_path / "scenes", train=8, val=5, side=64)
    settings = {"recipe": f"{task}_demo", "img_size": 64, "batch_size": 4, "epochs": 1, "warmup_epochs": 0}
    if task == "segmentation":
        settings["scene_size"] = (192, 64)
    trainer = Trainer(tmp_path / "scenes", name=task, output=tmp_path, **settings)
    last = trainer.fit().last
    found = trainer.evaluate()
    assert found["images"] == last["images"] == 5
    assert found[score] == pytest.approx(last[score], abs=1e-6)
    assert trainer.evaluate(tmp_path / "scenes", split="train")["images"] == 8
    with pytest.raises(UserError, match=f"is a network for {task}"):
        trainer.predict([])


def test_every_method_imports_the_plugin_of_the_model(images, tmp_path, monkeypatch):
    """As in a new process, where `fit` is not called."""

    def forget_plugin() -> None:
        MODELS.pop("tiny_pool", None)
        sys.modules.pop("model_plugin", None)

    (tmp_path / "model_plugin.py").write_text(MODEL.format(name="tiny_pool"))
    monkeypatch.syspath_prepend(tmp_path)
    where = {"name": "plugin", "output": tmp_path, "plugin": "model_plugin"}
    where |= {"model": "tiny_pool", "opt": "adamw"}  # it has no matrices for Muon
    settings = SETTINGS | where | {"stop_at_step": 1, "mix_token": False}
    try:
        assert not Trainer(images, **settings).fit().finished
        trainer = Trainer(images, **settings)
        forget_plugin()
        assert trainer.evaluate()["images"] == 20
        forget_plugin()
        assert len(trainer.predict([next((images / "val").rglob("*.jpg"))], top=3)[0]) == 3
        forget_plugin()
        assert (trainer.export(tmp_path / "exported") / "model.safetensors").exists()
    finally:
        forget_plugin()


def test_a_profile_ends_with_the_run(images: Path, tmp_path: Path) -> None:
    """After an error nothing is recorded any more; a shorter run has the profile of its steps, if any."""

    def fail(_: TrainContext) -> None:
        raise ValueError

    settings = SETTINGS | {"stop_at_step": 3, "profile": "2:9"}
    failing = Trainer(images, name="failing", output=tmp_path, callbacks=[AtStep(2, fail)], **settings)
    with pytest.raises(UserError, match="AtStep failed in step_done"):
        failing.fit()
    assert not torch.autograd._profiler_enabled()
    expected = (("failing", "", []), ("shorter", "2:9", ["steps_2-3"]), ("none", "11:12", []))
    for name, steps, folders in expected:
        if steps:
            Trainer(images, name=name, output=tmp_path, **settings | {"profile": steps}).fit()
        assert [folder.name for folder in (tmp_path / name).glob("profile/*")] == folders
