"""Each test in this folder runs on the CPU, which checks the test itself, and on a GPU if there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.recipe import assemble
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.engine.step import train_step

OpenContext = Callable[..., TrainContext]
USUAL: dict[str, Any] = {"model": "volo_demo", "img_size": 64, "batch_size": 4, "epochs": 2, "lr": 1e-3}
USUAL |= {"warmup_epochs": 0, "workers": 2, "token_label": True, "ground_truth": True}

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
def images(demo_images: Callable[[int, int], Path]) -> Path:
    """Return a folder with images for six steps of two micro-batches, and their label maps."""
    return demo_images(48, 10)


@pytest.fixture
def open_context(images: Path, device, tmp_path, monkeypatch) -> Iterator[OpenContext]:
    """Return a function that sets up runs on the device; all are closed at the end."""

    def use_device(world: World, _device: str) -> RankResources:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return RankResources(device=device, threads=2, binding="test")

    # A run would use the GPU if there is one; the test's device replaces it.
    monkeypatch.setattr("horovod_volo.engine.run.rank_resources", use_device)
    contexts: list[TrainContext] = []

    def opening(**settings: Any) -> TrainContext:
        places = {"data_dir": str(images), "output": str(tmp_path / f"run{len(contexts)}")}
        places |= {"token_label_data": str(images / "token_labels")}
        config = assemble(USUAL | places | settings, fallback_name="")
        context, _ = setup(config, World.single(), StopRequest())
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
