"""A run that meets damaged files of its checkpoints names them and goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.config.values import assemble
from horovod_volo.core.errors import UserError
from horovod_volo.data.demo.demo_set import make_demo_set
from horovod_volo.engine import loop
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.models.pretrained import load_pretrained

Start = Callable[..., tuple[TrainContext, list[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that sets up a run of three steps; it saves after each and evaluates at the end."""
    make_demo_set(tmp_path / "images", train=12, val=10)
    settings: dict[str, Any] = {"model": "volo_demo", "img_size": 32, "batch_size": 4, "epochs": 1}
    settings |= {"warmup_epochs": 0, "cooldown_epochs": 0, "log_every": 1, "workers": 1}
    settings |= {"checkpoint_every": 1, "keep_checkpoints": 3, "name": "run"}
    settings |= {"data_dir": str(tmp_path / "images"), "output": str(tmp_path / "runs")}
    started: list[TrainContext] = []

    def set_up(**changes: object) -> tuple[TrainContext, list[str]]:
        while started:  # only one run at a time has the folder
            started.pop().close()
        context, warnings = setup(
            assemble(settings | changes, fallback_name=""), World.single(), StopRequest()
        )
        started.append(context)
        return context, warnings

    yield set_up
    while started:
        started.pop().close()


def test_a_damaged_checkpoint_that_is_passed_over_is_named(start: Start) -> None:
    context, _ = start()
    assert loop.fit(context)
    checkpoints = context.folder / "checkpoints"
    (checkpoints / "step_00000003" / "model.safetensors").write_bytes(b"")
    resumed, warnings = start(resume="auto")
    assert resumed.state.step == 2
    (warning,) = (text for text in warnings if "damaged" in text)
    assert warning == (
        f"{checkpoints / 'step_00000003'} is damaged: model.safetensors does not match its checksum; "
        "step_00000002 is resumed"
    )


def test_mean_and_std_travel_with_the_weights(start: Start, tmp_path: Path) -> None:
    own = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.5, 1.0)}
    model: Any = {"name": "volo_demo", "image_side": 32}
    context, _ = start(checkpoint_every=3, **own)
    assert loop.fit(context)
    loaded = load_pretrained(str(context.folder), **model)
    assert (loaded.mean, loaded.std) == tuple(own.values())
    weights = next((context.folder / "checkpoints").glob("step_*/model.safetensors"))
    alone = tmp_path / "alone.safetensors"  # without the settings of its run
    shutil.copy(weights, alone)
    assert load_pretrained(str(alone), **model, std=own["std"]).mean == own["mean"]
    with pytest.raises(UserError, match=r"was trained with --mean 0\.5 0\.4 0\.3 --std"):
        load_pretrained(str(context.folder), **model, mean=(0.5, 0.5, 0.5))
    with pytest.raises(AllRanksError, match=r"has mean and std --mean 0\.5 0\.4 0\.3 .* this run has of the"):
        start(resume="auto")
    with pytest.raises(AllRanksError, match=r"--std 0\.25 0\.5 0\.5, .* Give --mean 0\.5 0\.4 0\.3"):
        start(resume="auto", mean=own["mean"], std=(0.25, 0.5, 0.5))
    start(resume="auto", **own)
    _, warnings = start(name="other", finetune=str(alone))
    assert any("trained with --mean 0.5 0.4 0.3" in text for text in warnings), warnings


@pytest.mark.parametrize("content", [b"", b'{"top1": 3', b"[3]", b"{}", b'{"top1": "high"}', b"[" * 100_000])
def test_a_damaged_evaluation_of_the_best_checkpoint_is_named(start: Start, content: bytes) -> None:
    context, _ = start(checkpoint_every=3)
    checkpoints = context.folder / "checkpoints"
    (checkpoints / "step_00000001").mkdir(parents=True)
    (checkpoints / "step_00000001" / "evaluation.json").write_bytes(content)
    (checkpoints / "best").symlink_to("step_00000001")
    assert loop.fit(context)
    assert (checkpoints / "best").resolve().name == "step_00000003"
    assert "step_00000001/evaluation.json is damaged" in (context.folder / "log.txt").read_text()
