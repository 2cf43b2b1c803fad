"""Ten steps of our training against ten with the published network, the published loss and torch's AdamW."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_volo.bench.synthetic import bench_config, learner_of, synthetic_context
from horovod_volo.cluster.world import World
from horovod_volo.core.batch import Labels, TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from horovod_volo.objective.mixing import Box
from tests.published import pairs
from tests.published.checkouts import PublishedCode
from tests.published.conftest import compare

STEPS, BATCH, PIXELS = 10, 4, 64
DECAY = (
    1.0  # twenty times the published one, so that a tensor in the wrong group is detected within ten steps
)


@dataclass(frozen=True)
class Step:
    """The inputs of a step of both trainings."""

    images: Tensor
    labels: Labels
    box: Box
    lr: float
    draws: list[pairs.Draw]  # of drop path


@dataclass(frozen=True)
class TrainedModel:
    """The result of a training."""

    losses: Tensor  # (steps,)
    weights: dict[str, Tensor]
    model: nn.Module


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_ten_steps(published: PublishedCode, name: str) -> None:
    """Our training may differ from the published one as much as rounding changes the published one.

    AdamW divides each gradient by its magnitude, so a gradient that is only rounding gives a full step.
    The effect is measured with the published training in double precision.
    """
    context = context_of(name)
    begin = {key: tensor.clone() for key, tensor in context.state.model.state_dict().items()}
    ours, steps = train_ours(context)
    single = train_published(published, name, begin, steps, torch.float32)
    double = train_published(published, name, begin, steps, torch.float64)

    own, rounding = distances(ours, single, begin), distances(single, double, begin)
    whole = rounding.pop("all")
    assert 1e-5 < whole < 1e-2  # otherwise the comparison is meaningless
    nothing = torch.tensor(0.0)
    what = f"{name}, ten steps, distance relative to the update"
    compare(what, torch.tensor(own.pop("all")), nothing, whole)
    # Each tensor alone. Without its decay, one drawn with a standard deviation of 0.02 would differ by 0.02.
    excess = {key: own[key] - 2 * rounding[key] for key in own}
    farthest = max(excess, key=excess.__getitem__)
    alone = f"{what}, {farthest} alone, rounding {rounding[farthest]:.1e}"
    compare(alone, torch.tensor(own[farthest]), nothing, 2 * rounding[farthest] + 5e-3)
    # Losses of 10 to 14 are rounded to about 1e-6.
    of_losses = (single.losses - double.losses).abs().max().item()
    compare(f"{name}, ten losses", ours.losses, double.losses, 2 * of_losses + 1e-6)
    pairs.compare_statistics(name, ours.model, single.model)


def distances(one: TrainedModel, other: TrainedModel, begin: dict[str, Tensor]) -> dict[str, float]:
    """Return the distance of two models relative to the second's update, for each tensor and in total."""
    apart = {key: (one.weights[key] - end).norm().item() for key, end in other.weights.items()}
    updates = {key: (end - begin[key]).norm().item() for key, end in other.weights.items()}
    whole = math.hypot(*apart.values()) / math.hypot(*updates.values())
    return {key: apart[key] / updates[key] for key in updates} | {"all": whole}


def context_of(name: str) -> TrainContext:
    """Build our run of the published command, with smaller images."""
    lvvit = name.startswith("lvvit")
    config = bench_config(
        model=name,
        num_classes=pairs.CLASSES,
        img_size=PIXELS,
        batch_size=BATCH,
        drop_path=0.1,
        weight_decay=DECAY,
        label_geometry="reference",
        ground_truth=not lvvit,
        dense_weight=1.0 if lvvit else 0.5,
        precision="fp32",
    )
    context = synthetic_context(config, World.single())
    context.lr = lambda step: 1e-4 * (step + 1)
    return context


def train_ours(context: TrainContext) -> tuple[TrainedModel, list[Step]]:
    """Train with the engine; return the result and the inputs of each step for the published training."""
    steps, losses = [], []
    for number in range(STEPS):
        labels = pairs.labels_of(BATCH, seed=number)
        images = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))
        box = learner_of(context).mix(number, 0)
        assert isinstance(box, Box)
        batch = TrainBatch(images, labels, np.arange(BATCH), np.arange(BATCH))
        context.progress.meter.reset()
        with pairs.record_draws_of_ours() as draws:
            train_step(context, iter([batch]))
        losses.append(context.progress.meter.sums()["total"])
        steps.append(Step(images, labels, box, context.lr(number), draws))
    return trained(losses, context.state.model), steps


def train_published(
    published: PublishedCode, name: str, begin: dict[str, Tensor], steps: list[Step], precision: torch.dtype
) -> TrainedModel:
    """Train the same steps with the published network and loss and torch's AdamW."""
    model = published.network(name, img_size=PIXELS, drop_path=0.1)
    model.load_state_dict(begin, strict=True)
    pair = pairs.Pair(name, ours=None, theirs=model.to(precision))
    optimizer = torch.optim.AdamW(groups_of(model), foreach=False, fused=False)
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step.lr
        target = pairs.published_target_of(published, step.labels, step.box.grid, precision=torch.float64)
        with pairs.use_draws_in_published(published, step.draws):
            loss = pair.published_loss(published, step.images.to(precision), target.to(precision), step.box)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, model)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Group a network's parameters as by the version of timm that the published training requires."""
    exempt = model.no_weight_decay()
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        plain = len(parameter.shape) == 1 or name.endswith(".bias") or name in exempt
        (others if plain else decayed).append(parameter)
    return [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": DECAY}]


def trained(losses: list[float], model: nn.Module) -> TrainedModel:
    """Return the result of a training in double precision."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    return TrainedModel(torch.tensor(losses, dtype=torch.float64), weights, model)
