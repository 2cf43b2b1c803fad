"""Generate token-label maps of the training images with a teacher, on any number of ranks.

Shards of the store are divided among the ranks by number; ranks communicate only at the start and at the end.
A map covers the whole image, resized to the teacher's square input without keeping the aspect ratio.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.core.errors import UserError
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.labelling.store_writer import SHARD_ROWS, LabelStoreWriter, check_new_store, open_writer
from horovod_volo.labelling.teacher import Teacher, TeacherChoice, TeacherImages, load_teacher
from horovod_volo.token_labels.geometry import WHOLE
from horovod_volo.token_labels.keys import names_of

Progress = Callable[[int, int], None]  # images that this rank has labelled, images it has to label
_CATALOG_FOLDER = ".catalog"
# With this logit a class leaves 21,841 others less than 1e-9 together, and fp16 rounds it by less than 0.008.
_HIGHEST_LOGIT = 32.0


def generate_labels(
    data_dir: str,
    store: Path,
    choice: TeacherChoice,
    top_k: int,
    world: World,
    progress: Progress,
    shard_rows: int = SHARD_ROWS,
) -> tuple[int, list[str]]:
    """Write the store; return its number of rows and the problems of all ranks.

    Collective: every rank calls this.
    """
    resources = rank_resources(world)
    if resources.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: the logits are stored as fp16
    world.run_on_rank_zero(partial(check_new_store, store))
    catalog = shared_catalog(data_dir, "train", store / _CATALOG_FOLDER, world)
    classes = len(catalog.classes)

    def load() -> Teacher:
        if top_k > classes:
            raise UserError(f"--top is {top_k}, but there are {classes} classes. Give at most {classes}.")
        return load_teacher(choice, classes)

    teacher = world.run_on_all_ranks(load)
    teacher.network.to(resources.device)

    def open_store() -> LabelStoreWriter:
        # The shape of the maps is that of the logits for a blank image.
        blank = torch.zeros(1, 3, teacher.image_side, teacher.image_side, device=resources.device)
        height, width = teacher.label(blank).shape[2:]
        return open_writer(
            store,
            list(names_of(catalog)),
            classes=classes,
            map_shape=(top_k, height, width),
            shard_rows=shard_rows,
            geometry=str(WHOLE),
            teacher=teacher.name,
            catalog=catalog.digest,
            generated=True,
        )

    writer = world.run_on_rank_zero(open_store)
    with closing(TeacherImages(catalog, teacher.image_side, choice.batch_size, resources)) as images:
        problems = _label_shards(writer, teacher, images, world, progress)
    problems_by_rank = world.allgather_object(problems)
    if world.is_rank_zero:
        writer.finish()
        shutil.rmtree(store / _CATALOG_FOLDER)
    return len(catalog), list(chain(*problems_by_rank))


def _label_shards(
    writer: LabelStoreWriter, teacher: Teacher, images: TeacherImages, world: World, progress: Progress
) -> list[str]:
    """Write the unfinished shards of this rank; return the problems of all its shards."""
    records = {number: writer.finished(number) for number in range(world.rank, writer.shards, world.size)}
    problems = [problem for record in records.values() if record for problem in record.problems]
    unfinished = [number for number, record in records.items() if record is None]
    total, done, top_k = sum(len(writer.rows(number)) for number in unfinished), 0, writer.metadata.top
    progress(done, total)
    for number in unfinished:
        rows, labelled = writer.rows(number), 0
        scores, ids = writer.empty_shard(number)
        for indices, pixels in images.pixels(rows):
            logits = teacher.label(pixels).float()  # (images, classes, height, width)
            best = centred(logits, top_k).topk(top_k, dim=1)
            shard_rows = [index - rows.start for index in indices]
            scores[shard_rows] = best.values.clamp(min=0).half().cpu().numpy()
            ids[shard_rows] = best.indices.cpu().numpy()
            labelled += len(indices)
            progress(done + labelled, total)
        if not torch.from_numpy(scores).isfinite().all():
            raise UserError(
                f"the logits of {teacher.name} are not finite. Check that the weights are complete and "
                "belong to this network."
            )
        done += len(rows)
        progress(done, total)
        problems += writer.write(number, scores, ids, images.bad_samples.new_messages()).problems
    return problems


def centred(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Subtract from a cell's logits the log-mean-exp of those of its classes outside the top k.

    `logits` are (images, classes, height, width). If 0 is then taken as the logit of each class outside the
    top k, as in training, these keep their probabilities.
    """
    best = logits.topk(top_k, dim=1)
    others = logits.scatter(1, best.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    mean = others - math.log(max(1, logits.shape[1] - top_k))
    # Without other classes, or far above them, only the differences between the top k matter.
    return logits - torch.maximum(mean, best.values[:, :1] - _HIGHEST_LOGIT)
