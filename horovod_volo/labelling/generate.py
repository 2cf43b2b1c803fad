"""Label every part of every training image with a teacher, on as many ranks as there are.

Each rank makes whole shards of the store, by their numbers, and meets the others only at the beginning and at
the end. A map covers the whole image, squashed to the teacher's square: crops are found in it by their shares
of the image's height and width.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import WHOLE
from horovod_volo.data.labels.keys import keys_of
from horovod_volo.data.labels.store_writer import SHARD_ROWS, LabelStoreWriter, begin, check_free
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_STD
from horovod_volo.data.teacher_images import TeacherImages
from horovod_volo.engine.shared_catalog import shared_catalog
from horovod_volo.models.teacher import Teacher, load_teacher

Progress = Callable[[int, int], None]  # images done by this rank, of how many
CATALOG_FOLDER = ".catalog"


@dataclass(frozen=True)
class Order:
    """Which images are to be labelled, by whom, and where the labels go."""

    data_dir: str
    store: Path
    teacher: str
    weights: str
    pretrained: bool
    image_side: int
    batch: int
    top: int
    shard_rows: int = SHARD_ROWS


def label_images(order: Order, world: World, progress: Progress) -> tuple[int, list[str]]:
    """Make the store; return its number of rows and what was left out. Collective: every rank calls this."""
    resources = rank_resources(world)
    if resources.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the labels are kept in half precision
    world.run_on_rank_zero(lambda: check_free(order.store))
    catalog = shared_catalog(order.data_dir, "train", order.store / CATALOG_FOLDER, world)
    teacher = world.run_on_all_ranks(lambda: _teacher(order, len(catalog.classes), resources.device))
    making: LabelStoreWriter = world.run_on_rank_zero(
        lambda: _begin(order, catalog, teacher, resources.device)
    )
    images = TeacherImages(
        catalog,
        image_size=teacher.image_side,
        batch=order.batch,
        device=resources.device,
        threads=resources.threads,
    )
    with closing(images):
        problems = _label_share(making, teacher, images, order.top, world, progress)
    everyones = world.allgather_object(problems)
    if world.is_rank_zero:
        making.finish()
        shutil.rmtree(order.store / CATALOG_FOLDER)
    return len(catalog), [problem for of_rank in everyones for problem in of_rank]


def _teacher(order: Order, classes: int, device: torch.device) -> Teacher:
    if order.top > classes:
        raise UserError(f"--top is {order.top}, but there are {classes} classes. Give {classes} or less.")
    return load_teacher(
        order.teacher,
        weights=order.weights,
        pretrained=order.pretrained,
        image_side=order.image_side,
        classes=classes,
    ).on(device)


def _begin(order: Order, catalog: Catalog, teacher: Teacher, device: torch.device) -> LabelStoreWriter:
    trial = teacher.label(torch.zeros(1, 3, teacher.image_side, teacher.image_side, device=device))
    _, _, rows, columns = trial.shape
    return begin(
        order.store,
        keys_of(catalog),
        classes=len(catalog.classes),
        size=(order.top, rows, columns),
        geometry=str(WHOLE),
        teacher=teacher.name,
        catalog=catalog.digest,
        shard_rows=order.shard_rows,
    )


def _label_share(
    making: LabelStoreWriter,
    teacher: Teacher,
    images: TeacherImages,
    top: int,
    world: World,
    progress: Progress,
) -> list[str]:
    """Make this rank's shards that are not finished yet; return what is missing in all of its shards."""
    problems: list[str] = []
    to_make = []
    for number in range(world.rank, making.shards, world.size):
        record = making.finished(number)
        if record is None:
            to_make.append(number)
        else:
            problems += record.problems
    total = sum(len(making.rows(number)) for number in to_make)
    done = 0
    progress(done, total)
    for number in to_make:
        problems += _label_shard(making, number, teacher, images, top, partial(_tell, progress, done, total))
        done += len(making.rows(number))
    return problems


def _tell(progress: Progress, before: int, total: int, labelled: int) -> None:
    progress(before + labelled, total)


def _label_shard(
    making: LabelStoreWriter,
    number: int,
    teacher: Teacher,
    images: TeacherImages,
    top: int,
    tell: Callable[[int], None],
) -> tuple[str, ...]:
    rows = making.rows(number)
    scores, ids = making.empty(number)
    labelled = 0
    images.problems.clear()
    for places, pixels in images.batches(rows):
        logits = teacher.label(colours_of(pixels))  # (images, classes, rows, columns)
        best = logits.topk(top, dim=1)
        own = [place - rows.start for place in places]
        scores[own] = best.values.half().cpu().numpy()
        ids[own] = best.indices.cpu().numpy()
        labelled += len(places)
        tell(labelled)
    if not torch.from_numpy(scores).isfinite().all():
        raise UserError(
            f"the logits of {teacher.name} are no numbers that half precision can hold. Check that the "
            "weights are whole and belong to this network."
        )
    tell(len(rows))
    return making.write(number, scores, ids, images.problems).problems


def colours_of(pixels: torch.Tensor) -> torch.Tensor:
    """Undo the trainer's normalisation: colours from 0 to 1."""
    mean, std = (pixels.new_tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return pixels * std + mean
