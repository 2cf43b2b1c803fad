"""Work without images: random batches, and a run of the real engine around them.

The figures must not depend on a disk, so nothing here reads one.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import torch

from horovod_volo.bench.pairs import Action
from horovod_volo.bench.random_labels import random_labels
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import check
from horovod_volo.config.values import assemble
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.catalog_file import CatalogWriter, Rows
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.data.loader import TrainBatch
from horovod_volo.engine.context import Images, TrainContext, build_context
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.state import build_state
from horovod_volo.engine.step import train_step
from horovod_volo.monitor.run_logger import NullLogger


def checked_config(settings: dict[str, Any]) -> Config:
    """Return the settings of a run, or raise UserError where they do not go together."""
    config = assemble(settings, fallback_name="bench")
    check(config)
    return config


def step_of(context: TrainContext, batch: TrainBatch) -> Action:
    """Return what takes a step of the run, always on the same batch."""
    passes = itertools.repeat(batch)

    def step() -> None:
        train_step(context, passes)

    return step


def losses_of(context: TrainContext, batch: TrainBatch, steps: int) -> torch.Tensor:
    """Take so many steps on the same batch and return the loss of each."""
    step, losses = step_of(context, batch), []
    for _ in range(steps):
        context.window.open()
        step()
        losses.append(context.window.sums()["total"])
    return torch.tensor(losses)


def random_batch(config: Config, num_classes: int, device: torch.device, seed: int) -> TrainBatch:
    """Draw one pass's batch."""
    batch, side = config.data.batch_size, config.model.img_size
    labels = random_labels(batch, num_classes, device, seed)
    images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return TrainBatch(
        images=images.to(device),
        labels=labels,
        indices=np.arange(batch),
    )


def synthetic_job(config: Config, world: World, num_classes: int) -> TrainContext:
    """Build a run whose streams are never asked for a batch. Collective: every rank calls this."""
    resources = rank_resources(world)
    state, _ = build_state(config, world, num_classes=num_classes, device=resources.device, finetune="")
    state.restore({}, world)
    global_batch = world.size * config.data.batch_size * config.update.accumulation
    catalog = images_nowhere(global_batch, num_classes)
    images = Images(catalog, catalog, label_maps=None)
    return build_context(config, world, images, resources, state, NullLogger(), StopRequest())


def images_nowhere(images: int, num_classes: int) -> Catalog:
    """List images that are nowhere."""
    memory = OpenFile(os.memfd_create("catalog"))
    writer = CatalogWriter(memory.descriptor)
    writer.add(Rows(labels=0, names=[f"{number}.jpg" for number in range(images)]))
    classes = [str(number) for number in range(num_classes)]
    writer.finish(classes, range(num_classes), shards=(), source="nowhere", state="")
    return Catalog(memory, path=None)
