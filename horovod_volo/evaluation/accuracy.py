"""The accuracy of a trained network, on as many ranks as there are.

Each rank notes what its own share of the images is taken for; the notes of all meet once, at the end. What
can be refused is refused before the first image is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.resources import RankResources, rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Data, Run
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.loader import NO_CLASS, EvalBatch, EvalLoader
from horovod_volo.data.pipeline import Normalization
from horovod_volo.engine.evaluation import Counts, count_right, total
from horovod_volo.engine.precision import autocast, mend_convolutions
from horovod_volo.engine.shared_catalog import folder_for_lists, shared_catalog
from horovod_volo.evaluation.imagenet_real import RealScore, read_real, score_real
from horovod_volo.evaluation.imagenet_v2 import numbered_catalog
from horovod_volo.evaluation.per_class import ClassScore, class_scores
from horovod_volo.models.aux_head import Choice
from horovod_volo.models.pretrained import PretrainedModel, load_pretrained

Progress = Callable[[int, int], None]  # images done by this rank, of how many


@dataclass(frozen=True)
class EvalRequest:
    """Which network is to be asked about which images, and how."""

    data_dir: str
    weights: str
    model: str  # empty: the weights tell
    use_ema: bool  # the averaged weights, where raw ones lie with them
    aux_head: Choice  # whether the best token's logits are added
    image_side: int  # 0: the one it was trained at
    crop_pct: float  # 0: the network's own
    batch: int
    workers: int  # 0: the rank's share of the cores
    precision: str
    split: Split
    catalog_dir: str  # empty: beside the runs, where several ranks share the list
    real: str  # empty: not asked for
    v2: bool


@dataclass(frozen=True)
class EvalResult:
    """What was found, the same on every rank."""

    network: PretrainedModel
    crop_pct: float
    images: str  # where they lie
    counts: Counts
    real: RealScore | None
    classes: list[ClassScore]  # the worst first
    damage: list[str]  # images that were left out, in words


def measure_accuracy(question: EvalRequest, world: World, progress: Progress) -> EvalResult:
    """Show the network every image once; return what it took them for. Collective: every rank calls this."""
    resources = rank_resources(world)
    catalog = _list_images(question, world)
    network = world.run_on_all_ranks(partial(_load, question, catalog))
    world.assert_same(network.network.parameters(), "The weights")
    real = world.run_on_all_ranks(partial(_real, question, catalog, network)) if question.real else None
    network.network.to(resources.device)
    mend_convolutions(network.network, question.precision, resources.device)
    crop_pct = question.crop_pct or network.crop_pct
    stream = _stream(question, catalog, network, crop_pct, resources, world)
    notes = Notes(len(range(world.rank, len(catalog), world.size)), progress)
    with closing(stream), torch.inference_mode(), autocast(question.precision, resources.device):
        counts = count_right(network.network, stream, resources.device, notes)
    totals = world.run_on_all_ranks(partial(total, counts, catalog, world))
    taken = notes.of_all_ranks(world, len(catalog))
    return EvalResult(
        network,
        crop_pct,
        catalog.source,
        totals,
        None if real is None else score_real(real, taken),
        class_scores(catalog.classes, catalog.targets, taken),
        [text for of_rank in world.allgather_object(stream.bad_samples.new_messages()) for text in of_rank],
    )


class Notes:
    """What this rank's images were taken for, without waiting for the device."""

    def __init__(self, images: int, progress: Progress) -> None:
        self._images = images
        self._done = 0
        self._progress = progress
        self._places: list[NDArray[np.int64]] = []
        self._taken: list[Tensor] = []

    def __call__(self, batch: EvalBatch, taken: Tensor) -> None:
        """Note the class that each image of a batch is taken for (batch,); of damaged ones, none."""
        self._places.append(batch.indices)
        self._taken.append(torch.where(batch.classes == NO_CLASS, NO_CLASS, taken))
        self._done += len(batch.indices)
        self._progress(self._done, self._images)

    def of_all_ranks(self, world: World, images: int) -> NDArray[np.int64]:
        """Return the class that each image of the catalog is taken for. Collective: every rank calls this."""
        mine = torch.cat(self._taken).cpu().numpy() if self._taken else np.empty(0, np.int64)
        places = np.concatenate(self._places) if self._places else np.empty(0, np.int64)
        everyones = np.full(images, NO_CLASS)
        for where, what in world.allgather_object((places, mine)):
            everyones[where] = what
        return everyones


def check_writable(file: str) -> None:
    """Raise UserError where a file could not be made: before the work, not after it."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(f"--json cannot write {file}. Name a file in a folder that is there.")


def _list_images(question: EvalRequest, world: World) -> Catalog:
    if question.v2:
        return numbered_catalog(question.data_dir, world)
    folder = folder_for_lists(question.catalog_dir, Run().output, world)
    return shared_catalog(question.data_dir, question.split, folder, world)


def _load(question: EvalRequest, catalog: Catalog) -> PretrainedModel:
    network = load_pretrained(
        question.weights,
        name=question.model,
        image_side=question.image_side,
        use_ema=question.use_ema,
        aux_head=question.aux_head,
    )
    if network.num_classes != len(catalog.classes):
        raise UserError(
            f"{catalog.source} has {len(catalog.classes)} class folders, but the network of "
            f"{question.weights} knows {network.num_classes} classes. Give images of the classes that it was "
            "trained on."
        )
    return network


def _real(question: EvalRequest, catalog: Catalog, network: PretrainedModel) -> list[frozenset[int]]:
    return read_real(question.real, catalog, network.num_classes)


def _stream(
    question: EvalRequest,
    catalog: Catalog,
    network: PretrainedModel,
    crop_pct: float,
    resources: RankResources,
    world: World,
) -> EvalLoader:
    return EvalLoader(
        catalog,
        # Every damaged image is told and counted: how many are too many is for the reader to say.
        Data(batch_size=question.batch, bad_samples="skip", bad_samples_limit=len(catalog)),
        image_size=network.image_side,
        crop_pct=crop_pct,
        rank=world.rank,
        size=world.size,
        device=resources.device,
        threads=question.workers or resources.threads,
        normalization=Normalization(network.mean, network.std),
        interpolation=network.interpolation,
    )
