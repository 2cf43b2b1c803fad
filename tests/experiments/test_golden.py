"""A hundred training steps of a small VOLO against a recorded loss curve and a simple loop on timm's network.

To record the curve again after an intended change:

    HOROVOD_VOLO_RECORD=1 python -m pytest tests/experiments/test_golden.py
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.recipe import assemble
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import setup
from horovod_volo.engine.step import train_step
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.volo import SIZES

STEPS, BATCH, PIXELS, CLASSES = 100, 8, 32, 10
RECORDED = Path(__file__).parent / "golden_losses.json"
# Steps that are compared one by one, and their largest relative difference. Another order of fp32 additions
# changes the losses by less; in later steps differences of rounding grow above those of a small mistake.
COMPARED, ROUNDING = 40, 2e-4

# The recorded run uses all methods of the published recipes, at a size that takes seconds.
COMPLETE = {"token_label": True, "ground_truth": True, "mix_token": True, "aa": "rand-m9-mstd0.5-inc1"}
COMPLETE |= {"reprob": 0.25, "drop_path": 0.2, "ema_decay": 0.99}
# Settings that a simple loop on timm's network supports, too.
PLAIN = {"token_label": False, "mix_token": False, "drop_path": 0.0, "smoothing": 0.1}


@pytest.fixture(scope="module")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    """Return a folder of demo images and label maps for an epoch of a hundred batches."""
    return demo_images(STEPS * BATCH, 20)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that sums are added in the same order on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def context_of(images: Path, output: Path, **settings: Any) -> TrainContext:
    """Set up a run in this process."""
    usual = {"data_dir": str(images), "output": str(output), "model": "volo_demo", "img_size": PIXELS}
    usual |= {"batch_size": BATCH, "workers": 2, "lr": 1e-3, "epochs": 1, "warmup_epochs": 0}
    usual |= {"clip_grad": 1.0, "compression": "none"}
    if settings["token_label"]:
        usual["token_label_data"] = str(images / "token_labels")
    context, _ = setup(assemble(usual | settings, fallback_name="golden"), World.single(), StopRequest())
    return context


def losses_of(context: TrainContext, observe: Callable[[Any], Any] = lambda batch: batch) -> Tensor:
    """Train for an epoch and return the loss of each step, (steps,)."""
    losses = []
    batches: Iterator[Any] = map(observe, context.learner.train_loader.batches(0, 0))
    for _ in range(STEPS):
        context.progress.meter.reset()
        train_step(context, batches)
        losses.append(context.progress.meter.sums()["total"])
    return torch.tensor(losses)


def test_a_complete_recipe_follows_the_recorded_curve(images, tmp_path):
    with closing(context_of(images, tmp_path, **COMPLETE)) as context:
        losses = losses_of(context)
    if os.environ.get("HOROVOD_VOLO_RECORD"):
        RECORDED.write_text(json.dumps([round(loss, 5) for loss in losses.tolist()]) + "\n")
    recorded = torch.tensor(json.loads(RECORDED.read_text()))
    difference = (losses - recorded).abs() / recorded
    assert difference[:COMPARED].max() < ROUNDING, difference[:COMPARED]
    # Differences of rounding grow with each step, but means over ten steps agree on all processors.
    tens = (losses.view(-1, 10).mean(dim=1) / recorded.view(-1, 10).mean(dim=1) - 1).abs()
    assert tens.max() < 0.02, tens
    assert recorded[-30:].mean() < recorded[:30].mean()


def test_losses_equal_those_of_a_simple_loop_on_timms_network(images, tmp_path):
    with closing(context_of(images, tmp_path, **PLAIN)) as context:
        theirs = timms_network(context.state.model)
        plain = SimpleLoop(theirs, context)
        losses = losses_of(context, observe=plain.step)
    difference = (losses - torch.tensor(plain.losses)).abs()
    assert difference[:COMPARED].max() < 1e-4, difference[:COMPARED]
    assert difference.mean() < 0.02, difference
    assert losses[-10:].mean() < losses[:10].mean()


def timms_network(ours: nn.Module) -> nn.Module:
    """Return timm's network with the same weights."""
    theirs: nn.Module = VOLO(
        img_size=PIXELS, num_classes=CLASSES, use_aux_head=False, use_mix_token=False, **SIZES["volo_demo"]
    )
    theirs.load_state_dict(ours.state_dict())
    return theirs.train()


class SimpleLoop:
    """A simple training loop with torch's own functions, on the trainer's batches."""

    def __init__(self, network: nn.Module, context: TrainContext) -> None:
        self.losses: list[float] = []
        self._network, self._lr = network, context.lr
        update = context.config.update
        exempt = network.no_weight_decay()  # type: ignore[operator]
        decayed, others = [], []
        for name, parameter in network.named_parameters():
            plain = parameter.ndim <= 1 or name in exempt
            (others if plain else decayed).append(parameter)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=update.weight_decay)
        self._smoothing, self._clip = context.config.objective.smoothing, update.clip_grad

    def step(self, batch: Any) -> Any:
        """Train one step on a batch and return the batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr(len(self.losses))
        logits = self._network(batch.images)
        classes = batch.classes if hasattr(batch, "classes") else batch.labels.classes
        loss = F.cross_entropy(logits, classes, label_smoothing=self._smoothing)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), self._clip)
        self._optimizer.step()
        self.losses.append(loss.item())
        return batch
