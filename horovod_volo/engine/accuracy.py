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

from horovod_volo.cluster.share import Share, share_of_host
from horovod_volo.cluster.world import World
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Data, Run
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.pipeline import Colours
from horovod_volo.data.stream import NO_CLASS, Batch, EvalStream
from horovod_volo.engine.class_table import ClassScore, class_scores
from horovod_volo.engine.evaluation import Counts, count_right, total
from horovod_volo.engine.imagenet_v2 import numbered_catalog
from horovod_volo.engine.precision import autocast, mend_convolutions
from horovod_volo.engine.real_labels import RealScore, read_real, score_real
from horovod_volo.engine.shared_catalog import folder_for_lists, shared_catalog
from horovod_volo.models.aux_head import Choice
from horovod_volo.models.trained import Trained, load_trained

Progress = Callable[[int, int], None]  # images done by this rank, of how many


@dataclass(frozen=True)
class Question:
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
class Answer:
    """What was found, the same on every rank."""

    network: Trained
    crop_pct: float
    images: str  # where they lie
    counts: Counts
    real: RealScore | None
    classes: list[ClassScore]  # the worst first
    damage: list[str]  # images that were left out, in words


def measure_accuracy(question: Question, world: World, progress: Progress) -> Answer:
    """Show the network every image once; return what it took them for. Collective: every rank calls this."""
    share = share_of_host(world)
    catalog = _list_images(question, world)
    network = world.together(partial(_load, question, catalog))
    world.assert_same(network.network.parameters(), "The weights")
    real = world.together(partial(_real, question, catalog, network)) if question.real else None
    network.network.to(share.device)
    mend_convolutions(network.network, question.precision, share.device)
    crop_pct = question.crop_pct or network.crop_pct
    stream = _stream(question, catalog, network, crop_pct, share, world)
    notes = Notes(len(range(world.rank, len(catalog), world.size)), progress)
    with closing(stream), torch.inference_mode(), autocast(question.precision, share.device):
        counts = count_right(network.network, stream, share.device, notes)
    totals = world.together(partial(total, counts, catalog, world))
    taken = notes.of_all_ranks(world, len(catalog))
    return Answer(
        network,
        crop_pct,
        catalog.source,
        totals,
        None if real is None else score_real(real, taken),
        class_scores(catalog.classes, catalog.targets, taken),
        [text for of_rank in world.gather(stream.damage.untold()) for text in of_rank],
    )


class Notes:
    """What this rank's images were taken for, without waiting for the device."""

    def __init__(self, images: int, progress: Progress) -> None:
        self._images = images
        self._done = 0
        self._progress = progress
        self._places: list[NDArray[np.int64]] = []
        self._taken: list[Tensor] = []

    def __call__(self, batch: Batch, taken: Tensor) -> None:
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
        for where, what in world.gather((places, mine)):
            everyones[where] = what
        return everyones


def check_writable(file: str) -> None:
    """Raise UserError where a file could not be made: before the work, not after it."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(f"--json cannot write {file}. Name a file in a folder that is there.")


def _list_images(question: Question, world: World) -> Catalog:
    if question.v2:
        return numbered_catalog(question.data_dir, world)
    folder = folder_for_lists(question.catalog_dir, Run().output, world)
    return shared_catalog(question.data_dir, question.split, folder, world)


def _load(question: Question, catalog: Catalog) -> Trained:
    network = load_trained(
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


def _real(question: Question, catalog: Catalog, network: Trained) -> list[frozenset[int]]:
    return read_real(question.real, catalog, network.num_classes)


def _stream(
    question: Question, catalog: Catalog, network: Trained, crop_pct: float, share: Share, world: World
) -> EvalStream:
    return EvalStream(
        catalog,
        # Every damaged image is told and counted: how many are too many is for the reader to say.
        Data(batch_size=question.batch, bad_samples="skip", bad_samples_limit=len(catalog)),
        image_size=network.image_side,
        crop_pct=crop_pct,
        rank=world.rank,
        size=world.size,
        device=share.device,
        threads=question.workers or share.threads,
        colours=Colours(network.mean, network.std),
        interpolation=network.interpolation,
    )
