"""Generate token-label maps of the training images with a teacher, on any number of ranks.

A teacher is a trained model. Its head is applied to each cell of the last feature map as if it were the
feature of the entire image, so that its norms and linear layers are used as they were trained. A map covers
the whole image, resized to the teacher's square input without keeping the aspect ratio.

Shards of the store are divided among the ranks by number; ranks communicate only at the start and at the end.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import AllRanksError, RankResources, World, rank_resources
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.labelling.store_writer import SHARD_ROWS, LabelStoreWriter, check_new_store, open_writer
from horovod_volo.models.build import check_model, spec_of
from horovod_volo.models.pretrained import PretrainedModel, load_pretrained
from horovod_volo.models.registry import TokenModel, registered_model
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.weights import TIMM
from horovod_volo.token_labels.geometry import WHOLE
from horovod_volo.token_labels.keys import names_of

Progress = Callable[[int, int], None]  # images that this rank has labelled, images it has to label
_CATALOG_FOLDER = ".catalog"
# With this logit a class leaves 21,841 others less than 1e-9 together, and fp16 rounds it by less than 0.008.
_HIGHEST_LOGIT = 32.0


class TeacherChoice(NamedTuple):
    """Which teacher labels images, and in batches of which size."""

    name: str  # a model of timm or of this package, or a run folder
    weights: str = ""  # file of them
    pretrained: bool = False  # timm's weights
    image_side: int = 0  # pixels; 0: the model's own
    batch_size: int = 64


def load_teacher(choice: TeacherChoice, classes: Sequence[str]) -> PretrainedModel:
    """Build a teacher of these classes, whose name has the image size and a digest of its weights."""
    name, weights, pretrained, image_side, _ = choice
    is_run = Path(name).is_dir()
    if is_run:
        trained = load_pretrained(weights or name, image_side=image_side)
    elif pretrained and not weights and registered_model(name) is None:
        trained = load_pretrained(f"{TIMM}{name}", image_side=image_side)
    else:
        check_model(name, img_size=image_side or spec_of(name).img_size, tokens=False)
        if not weights:
            raise UserError(
                f"the teacher {name} has no weights yet. Name a file of them with --teacher-weights; for a "
                "model of timm, --teacher-pretrained takes those in its cache or fetches them."
            )
        trained = load_pretrained(weights, name=name, image_side=image_side)
    names = trained.class_names if is_run or weights else ()  # not timm's: folders may have others
    pairs = zip(names, classes, strict=False)
    different = "".join([f", with {ours!r} for {theirs!r}" for theirs, ours in pairs if theirs != ours][:1])
    if trained.num_classes != len(classes) or different:
        raise UserError(
            f"the teacher {name} has {trained.num_classes} classes, the images have {len(classes)} class "
            f"folders{different}. Both must be the same: give a teacher that was trained on these, or name "
            "the classes of tar shards in classes.txt beside them."
        )
    digest = hashlib.sha256()
    for tensor in trained.network.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    shown = Path(name).resolve().name if is_run else name
    shown = f"{shown} at {trained.image_side} pixels, weights {digest.hexdigest()[:12]}"
    return replace(trained, name=shown)


def teacher_images(
    teacher: PretrainedModel, catalog: Catalog, batch: int, resources: RankResources
) -> EvalLoader:
    """Return a catalog's images as the teacher sees them; damaged ones are skipped and reported."""
    return EvalLoader(
        catalog,
        Data(batch_size=batch, bad_samples="skip", bad_samples_limit=len(catalog)),
        image_size=teacher.image_side,
        crop_pct=1.0,
        crop_mode="squash",
        rank=0,
        size=1,
        device=resources.device,
        threads=resources.threads,
        normalization=Normalization(teacher.mean, teacher.std),
        interpolation=teacher.interpolation,
    )


@torch.inference_mode()
def token_logits(network: Any, images: Tensor) -> Tensor:
    """Return the logits (images, classes, rows, columns) of the cells of a model's feature map."""
    grid = network.grid if isinstance(network, TokenModel) and hasattr(network, "grid") else None
    if grid is None and not all(
        callable(getattr(network, part, None)) for part in ("forward_features", "forward_head")
    ):
        raise _unsuitable(network, "it has no separate features and head")
    features: Any = network.forward_features(images)
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        raise _unsuitable(network, "its features are neither a map nor a sequence of tokens")
    if isinstance(network, VOLO):
        grid = tuple(network.pos_embed.shape[1:3])
    if grid is not None:  # tokens after that of the class, for which there is a head of their own
        head = network.head if network.aux_head is None else network.aux_head
        logits: Tensor = head(features[:, 1:])
    elif features.ndim == 4:
        channels_last = getattr(network, "output_fmt", "NCHW") == "NHWC"
        maps = features if channels_last else features.permute(0, 2, 3, 1)
        grid, cells = tuple(maps.shape[1:3]), maps.flatten(0, 2)  # (cells, channels)
        logits = _head_logits(network, cells[:, None, None] if channels_last else cells[..., None, None])
    else:
        prefix = int(getattr(network, "num_prefix_tokens", 0))  # class, distillation and register tokens
        tokens = features[:, prefix:]  # (images, rows * columns, channels)
        grid = (math.isqrt(tokens.shape[1]),) * 2
        if math.prod(grid) != tokens.shape[1]:
            raise _unsuitable(network, f"its {tokens.shape[1]} tokens are not a square grid")
        # All tokens of a sequence are the cell's, so it does not matter which of them the head uses.
        logits = _head_logits(network, tokens.flatten(0, 1)[:, None].expand(-1, prefix + 1, -1))
    return logits.reshape(len(features), *grid, -1).permute(0, 3, 1, 2)


def _head_logits(network: Any, cells: Tensor) -> Tensor:
    logits: Any = network.forward_head(cells)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(cells):
        raise _unsuitable(network, "its head gives no logits for a single cell")
    return logits  # (cells, classes)


def _unsuitable(network: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(network).__name__} cannot label parts of an image: {reason}. Take a convolutional network or "
        "a transformer over one grid of tokens as --teacher."
    )


def generate_labels(
    data_dir: str,
    store: Path,
    choice: TeacherChoice,
    top_k: int,
    world: World,
    progress: Progress,
    shard_rows: int = SHARD_ROWS,
) -> tuple[int, list[str]]:
    """Write the store; return its number of rows and the problems of all ranks. Collective."""
    resources = rank_resources(world)
    if resources.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: the logits are stored as fp16
    world.run_on_rank_zero(partial(check_new_store, store))
    catalog = shared_catalog(data_dir, "train", store / _CATALOG_FOLDER, world)
    classes = len(catalog.classes)

    def load() -> PretrainedModel:
        if top_k > classes:
            raise UserError(f"--top is {top_k}, but there are {classes} classes. Give at most {classes}.")
        return load_teacher(choice, catalog.classes)

    teacher = world.run_on_all_ranks(load)
    if len(names := sorted(set(world.allgather_object(teacher.name)))) > 1:
        raise AllRanksError(f"the teachers of the ranks differ: {'; '.join(names)}. Give all the same.")
    teacher.network.to(resources.device)

    def open_store() -> LabelStoreWriter:
        # The shape of the maps is that of the logits for a blank image.
        blank = torch.zeros(1, 3, teacher.image_side, teacher.image_side, device=resources.device)
        height, width = token_logits(teacher.network, blank).shape[2:]
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
    with closing(teacher_images(teacher, catalog, choice.batch_size, resources)) as images:
        problems = _label_shards(writer, teacher, images, world, progress)
    problems_by_rank = world.allgather_object(problems)
    if world.is_rank_zero:
        writer.finish()
        shutil.rmtree(store / _CATALOG_FOLDER, ignore_errors=True)  # NFS keeps the names of open files
    return len(catalog), list(chain(*problems_by_rank))


def _label_shards(
    writer: LabelStoreWriter, teacher: PretrainedModel, images: EvalLoader, world: World, progress: Progress
) -> list[str]:
    """Write the unfinished shards of this rank; return the problems of all its shards."""
    records = {number: writer.finished(number) for number in range(world.rank, writer.shards, world.size)}
    # Also those with problems: their images may have been repaired.
    unfinished = [number for number, record in records.items() if record is None or record.problems]
    total, done, top_k = sum(len(writer.rows(number)) for number in unfinished), 0, writer.metadata.top
    problems = list[str]()
    progress(done, total)
    for number in unfinished:
        rows = writer.rows(number)
        scores, ids = writer.empty_shard(number)
        for pending, pixels in images.decoded(np.array(rows, dtype=np.int64)):
            logits = token_logits(teacher.network, pixels).float()  # (images, classes, height, width)
            best, usable = centred(logits, top_k).topk(top_k, dim=1), ~pending.bad
            shard_rows = pending.indices[usable] - rows.start
            scores[shard_rows] = best.values.clamp(min=0).half().cpu().numpy()[usable]
            ids[shard_rows] = best.indices.cpu().numpy()[usable]
            done += len(pending.indices)
            progress(done, total)
        if not torch.from_numpy(scores).isfinite().all():
            raise UserError(
                f"the logits of {teacher.name} are not finite. Check that the weights are complete and "
                "belong to this network."
            )
        problems += writer.write(number, scores, ids, images.bad_samples.new_messages()).problems
    return problems


def centred(logits: Tensor, top_k: int) -> Tensor:
    """Subtract from a cell's logits the log-mean-exp of those of its classes outside the top k.

    `logits` are (images, classes, height, width). If 0 is then taken as the logit of each class outside the
    top k, as in training, these keep their probabilities.
    """
    best = logits.topk(top_k, dim=1)
    others = logits.scatter(1, best.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    mean = others - math.log(max(1, logits.shape[1] - top_k))
    # Without other classes, or far above them, only the differences between the top k matter.
    return logits - torch.maximum(mean, best.values[:, :1] - _HIGHEST_LOGIT)
