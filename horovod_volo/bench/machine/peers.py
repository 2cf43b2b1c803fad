"""Our training step against the training loops in use today, on the same random images and weights.

A plain loop around timm's network learns the images' classes: eager, in channels-last memory, or compiled.
The published training learns token labels from dense targets. Against each, ours learns from the same labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, Model, Pairs, Precision
from horovod_volo.bench.comparison import alternate, assert_agree, block_of
from horovod_volo.bench.machine.peers_timm import LoopName, TrainingLoop, plain_loop, published_loop
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import (
    RANDOM_LABELS,
    checked_config,
    losses_of,
    random_batch,
    step_of,
    synthetic_context,
)
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.mixing import NO_BOX, Box

CLASSES = 1000
_COMPARED_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative to the largest loss


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Precision = "fp32",
    drop_path: DropPath = 0.1,
    against: Annotated[Sequence[LoopName], Flag("training loops to compare with")] = (
        "eager",
        "channels-last",
        "published",
    ),
    pairs: Pairs = 7,
) -> Result:
    """Compare one rank's step with that of each training loop."""
    settings = {"model": model, "img_size": img_size, "batch_size": batch_size, "precision": precision}
    settings |= {"num_classes": CLASSES, "lr": 1e-4, "warmup_epochs": 0}
    figures: list[Figure] = []
    for form in against:
        tokens = form == "published"
        labels = RANDOM_LABELS if tokens else {"token_label": False}
        config = checked_config(settings | labels | {"mix_token": tokens})
        _assert_same_losses(form, config)
        dropping = replace(config, model=replace(config.model, drop_path=drop_path))
        figures += _compare(form, dropping, pairs)
    title = f"step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    return Result(f"peers {model} {precision} {' '.join(against)}", title, figures)


def _assert_same_losses(form: LoopName, config: Config) -> None:
    """Raise unless both have the same losses from the same weights, without drop path."""
    ours, batch, peer = _sides(form, config)
    losses = losses_of(ours, batch, _COMPARED_STEPS)
    ours.close()
    expected = torch.tensor([float(peer.step()) for _ in range(_COMPARED_STEPS)])
    what = f"the losses of {_COMPARED_STEPS} steps ({form})"
    assert_agree(what, losses, expected, _TOLERANCES[config.model.precision])


def _compare(form: LoopName, config: Config, pairs: int) -> list[Figure]:
    ours, batch, peer = _sides(form, config)
    device, images = ours.resources.device, config.data.batch_size
    found = alternate(block_of(step_of(ours, batch), device), block_of(peer.step, device), pairs)
    ours.close()
    return [
        Figure.of_rate(f"beside {form}: images a second", found.ours, images),
        Figure.of_rate(form, found.peer, images),
        Figure.of_estimate(f"faster than {form}", found.times_faster, "x"),
    ]


def _sides(form: LoopName, config: Config) -> tuple[TrainContext, TrainBatch, TrainingLoop]:
    """Build our run, its images, and the peer with the same weights; both mix tokens by the same box."""
    context = synthetic_context(config, World.single(), CLASSES)
    device = context.resources.device
    batch = random_batch(config, CLASSES, device, seed=0)
    side = tokens_per_side(config.model.model, config.model.img_size)
    box = Box(0, 0, side // 2, side // 2, grid=side) if config.objective.mix_token else NO_BOX
    if form == "published":
        peer = published_loop(config, batch, device, box)
    else:
        peer = plain_loop(form, config, batch, device)
    peer.network.load_state_dict(context.state.model.state_dict())
    return replace(context, mix=lambda step, number: box), batch, peer  # noqa: ARG005
