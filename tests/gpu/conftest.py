"""Each test in this folder runs on the CPU, which checks the test itself, and on a GPU if there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.recipe import assemble
from horovod_volo.config.schema import Config
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.engine.step import train_step

OpenContext = Callable[..., TrainContext]

ON_GPU = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"),
    ],
)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few images and their label maps."""
    folder = tmp_path_factory.mktemp("gpu") / "images"
    make_demo_set(folder, train=48, val=10)
    return folder


@pytest.fixture
def open_context(images, device, tmp_path, monkeypatch) -> Iterator[OpenContext]:
    """Return a function that sets up runs on the device; all are closed at the end."""

    def use_device(world: World, _device: str) -> RankResources:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return RankResources(device=device, threads=2, binding="test")

    # A run would use the GPU if there is one; the test's device replaces it.
    monkeypatch.setattr("horovod_volo.engine.run.rank_resources", use_device)
    contexts: list[TrainContext] = []

    def opening(**settings: Any) -> TrainContext:
        context, _ = setup(
            _config(images, tmp_path / f"run{len(contexts)}", settings), World.single(), StopRequest()
        )
        contexts.append(context)
        return context

    yield opening
    for context in contexts:
        context.close()


def losses(context: TrainContext, steps: int) -> list[float]:
    batches = context.learner.train_loader.batches(0, 0)
    found = []
    for _ in range(steps):
        context.progress.meter.reset()
        train_step(context, batches)
        found.append(context.progress.meter.sums()["total"])
    return found


def _config(images: Path, output: Path, settings: dict[str, Any]) -> Config:
    usual = {
        "data_dir": str(images),
        "output": str(output),
        "model": "volo_demo",
        "img_size": 64,
        "batch_size": 4,
        "workers": 2,
        "token_label": True,
        "token_label_data": str(images / "token_labels"),
        "ground_truth": True,
        "lr": 1e-3,
        "warmup_epochs": 0,
        "epochs": 2,
    }
    return assemble(usual | settings, fallback_name="")
