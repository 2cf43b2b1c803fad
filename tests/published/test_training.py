"""Ten steps of our training against ten of the published network, the published loss and plain AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_volo.bench.synthetic import checked_config, synthetic_context
from horovod_volo.cluster.world import World
from horovod_volo.core.batch import Labels, TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from horovod_volo.objective.mixing import Box
from tests.published.checkouts import Published, named_folder
from tests.published.conftest import Compare
from tests.published.drop_path import Draw, recorded_draws_of_ours, the_published_draw
from tests.published.examples import CLASSES, labels_of, published_target_of
from tests.published.pairs import Pair, compare_statistics

named_folder()  # or this module is skipped

STEPS, BATCH, PIXELS = 10, 4, 64
DECAY = 1.0  # twenty times the published one: a tensor in the wrong group is to show in ten steps


@dataclass(frozen=True)
class Step:
    """What both take a step with."""

    images: Tensor
    labels: Labels
    box: Box
    lr: float
    draws: list[Draw]  # of drop path


@dataclass(frozen=True)
class PretrainedModel:
    """What a training ends in."""

    losses: Tensor  # (steps,)
    weights: dict[str, Tensor]
    model: nn.Module


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_ten_steps(published: Published, compare: Compare, name: str) -> None:
    """Ours may be as far from the published training as rounding takes that one from itself.

    AdamW divides each gradient by its own size, so rounding grows at once to a whole step where a gradient is
    no more than rounding. How far that goes is measured: by the published training in double precision.
    """
    context = context_of(name)
    begin = {key: tensor.clone() for key, tensor in context.state.model.state_dict().items()}
    ours, steps = train_ours(context)
    single = train_published(published, name, begin, steps, torch.float32)
    double = train_published(published, name, begin, steps, torch.float64)

    own, rounding = distances(ours, single, begin), distances(single, double, begin)
    whole = rounding.pop("all")
    assert 1e-5 < whole < 1e-2  # else there is nothing to measure by
    nothing = torch.tensor(0.0)
    what = f"{name}, ten steps, distance as a share of the way"
    compare(what, torch.tensor(own.pop("all")), nothing, whole)
    # Each tensor alone; without its decay one that is drawn with a deviation of 0.02 is 0.02 away.
    excess = {key: own[key] - 2 * rounding[key] for key in own}
    farthest = max(excess, key=excess.__getitem__)
    alone = f"{what}, {farthest} alone, rounding {rounding[farthest]:.1e}"
    compare(alone, torch.tensor(own[farthest]), nothing, 2 * rounding[farthest] + 5e-3)
    # Losses of 10 to 14 are rounded to about 1e-6.
    of_losses = (single.losses - double.losses).abs().max().item()
    compare(f"{name}, ten losses", ours.losses, double.losses, 2 * of_losses + 1e-6)
    compare_statistics(name, ours.model, single.model)


def distances(one: PretrainedModel, other: PretrainedModel, begin: dict[str, Tensor]) -> dict[str, float]:
    """Return the distance of two trained models relative to the second's update, per tensor and in all."""
    apart = {key: (one.weights[key] - end).norm().item() for key, end in other.weights.items()}
    ways = {key: (end - begin[key]).norm().item() for key, end in other.weights.items()}
    whole = math.hypot(*apart.values()) / math.hypot(*ways.values())
    return {key: apart[key] / ways[key] for key in ways} | {"all": whole}


def context_of(name: str) -> TrainContext:
    """Build our run of the published command, but for the size of its images."""
    lvvit = name.startswith("lvvit")
    settings = {
        "model": name,
        "img_size": PIXELS,
        "batch_size": BATCH,
        "drop_path": 0.1,
        "weight_decay": DECAY,
        "token_label": True,
        "token_label_data": "random",
        "label_geometry": "reference",
        "ground_truth": not lvvit,
        "dense_weight": 1.0 if lvvit else 0.5,
        "precision": "fp32",
    }
    context = synthetic_context(checked_config(settings), World.single(), CLASSES)
    return replace(context, lr=lambda step: 1e-4 * (step + 1))


def train_ours(context: TrainContext) -> tuple[PretrainedModel, list[Step]]:
    """Take the steps by the engine; return with the result what the published training needs of them."""
    steps, losses = [], []
    for number in range(STEPS):
        labels = labels_of(BATCH, seed=number)
        images = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))
        box = context.mix(number, 0)
        assert isinstance(box, Box)
        batch = TrainBatch(images, labels, np.arange(BATCH))
        context.meter.reset()
        with recorded_draws_of_ours() as draws:
            train_step(context, iter([batch]))
        losses.append(context.meter.sums()["total"])
        steps.append(Step(images, labels, box, context.lr(number), draws))
    return trained(losses, context.state.model), steps


def train_published(
    published: Published, name: str, begin: dict[str, Tensor], steps: list[Step], precision: torch.dtype
) -> PretrainedModel:
    """Take the same steps with the published network and loss, and torch's own AdamW."""
    model = published.network(name, img_size=PIXELS, drop_path=0.1)
    model.load_state_dict(begin, strict=True)
    pair = Pair(name, ours=None, theirs=model.to(precision))
    optimizer = torch.optim.AdamW(groups_of(model), foreach=False, fused=False)
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step.lr
        target = published_target_of(published, step.labels, step.box.grid, precision=torch.float64)
        with the_published_draw(published, step.draws):
            loss = pair.published_loss(published, step.images.to(precision), target.to(precision), step.box)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, model)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Group a network's parameters by the rule of the timm that the published training asks for."""
    exempt = model.no_weight_decay()
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        plain = len(parameter.shape) == 1 or name.endswith(".bias") or name in exempt
        (others if plain else decayed).append(parameter)
    return [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": DECAY}]


def trained(losses: list[float], model: nn.Module) -> PretrainedModel:
    """Put the end of a training together, in double precision."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    return PretrainedModel(torch.tensor(losses, dtype=torch.float64), weights, model)
