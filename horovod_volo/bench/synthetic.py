"""Random batches and label maps, and runs of the real engine on them, so that no figure depends on a disk."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import torch

from horovod_volo.bench.comparison import Action
from horovod_volo.cluster.resources import RankResources, rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import check
from horovod_volo.config.values import assemble
from horovod_volo.core.batch import LabelMaps, Labels, TrainBatch
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.catalog_file import CatalogWriter, Rows
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.engine.context import Images, TrainContext, build_context
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.state import build_state
from horovod_volo.engine.step import train_step
from horovod_volo.monitor.run_logger import NullLogger

MAP_SIDE, TOP = 18, 5  # of the published label maps: cells per side, and classes in each cell
RANDOM_LABELS = {"token_label": True, "token_label_data": "random"}  # settings of a run on `random_batch`


def checked_config(settings: dict[str, Any]) -> Config:
    """Return the settings of a run; raise UserError where they are inconsistent."""
    config = assemble(settings, fallback_name="bench")
    check(config)
    return config


def random_labels(batch: int, num_classes: int, device: torch.device, seed: int) -> Labels:
    """Draw classes, label maps with distinct classes in each cell, and crops inside the image.

    Neighbouring cells have different classes, which is rare in real maps: no entries can be merged.
    """
    random = torch.Generator().manual_seed(seed)
    cells = (batch, TOP, MAP_SIDE, MAP_SIDE)
    scores = torch.rand(cells, generator=random).mul_(12).sort(dim=1, descending=True).values
    # Five increments of at most a fifth of the classes each never wrap around to the first class.
    steps = torch.randint(1, num_classes // TOP + 1, cells, generator=random)
    extents = torch.rand(batch, 2, generator=random) * 0.8 + 0.2
    corners = torch.rand(batch, 2, generator=random) * (1 - extents)
    maps = LabelMaps(
        scores=scores.half(),
        ids=(steps.cumsum(dim=1) % num_classes).int(),
        boxes=torch.cat([corners, extents], dim=1),
    )
    return Labels(torch.randint(num_classes, (batch,), generator=random), maps).to(device)


def random_batch(config: Config, num_classes: int, device: torch.device, seed: int) -> TrainBatch:
    """Draw the images and labels of one micro-batch."""
    batch, side = config.data.batch_size, config.model.img_size
    labels = random_labels(batch, num_classes, device, seed)
    images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return TrainBatch(
        images=images.to(device),
        labels=labels,
        indices=np.arange(batch),
    )


def synthetic_context(
    config: Config, world: World, num_classes: int, resources: RankResources | None = None
) -> TrainContext:
    """Build a run whose data streams are never read. Collective: every rank calls this.

    Without `resources` it runs on the rank's own device.
    """
    resources = resources or rank_resources(world)
    state, _ = build_state(config, world, num_classes=num_classes, device=resources.device, finetune="")
    if world.size > 1:
        state.load_full_state_dict({}, world)
    global_batch = world.size * config.data.batch_size * config.update.accumulation
    catalog = catalog_without_files(global_batch, num_classes)
    images = Images(catalog, catalog, label_maps=None)
    return build_context(config, world, images, resources, state, NullLogger(), StopRequest())


def catalog_without_files(images: int, num_classes: int) -> Catalog:
    """Build an in-memory catalog of images that do not exist."""
    memory = OpenFile(os.memfd_create("catalog"))
    writer = CatalogWriter(memory.descriptor)
    writer.add(Rows(labels=0, names=[f"{number}.jpg" for number in range(images)]))
    classes = [str(number) for number in range(num_classes)]
    writer.finish(classes, range(num_classes), shards=(), source="nowhere", state="")
    return Catalog(memory, path=None)


def step_of(context: TrainContext, batch: TrainBatch) -> Action:
    """Return a function that takes one step of the run on this batch."""
    micro_batches = itertools.repeat(batch)
    return lambda: train_step(context, micro_batches)


def losses_of(context: TrainContext, batch: TrainBatch, steps: int) -> torch.Tensor:
    """Take steps on the same batch and return the loss of each."""
    step, losses = step_of(context, batch), []
    for _ in range(steps):
        context.meter.reset()
        step()
        losses.append(context.meter.sums()["total"])
    return torch.tensor(losses)
