"""Detection: training images with boxes per second, and targets and loss, against those of SSD's reference.

All three feeds end in normalised images and their boxes; encoding belongs to the loss. Ours and Pillow take
the same windows and colours of the same scenes; DALI's own operators draw theirs. CPU seconds are compared,
as for classification.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import process_time
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, Flag, Pairs
from horovod_volo.bench.comparison import (
    WrongResultError,
    alternate,
    assert_agree,
    compare,
    default_device,
    peak_extra_bytes,
)
from horovod_volo.bench.machine.data import EPOCH, SEED
from horovod_volo.bench.machine.peers_dali import reference_pipeline
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Detection
from horovod_volo.data.images.image_bytes import decoded_rgb
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_NORMALIZATION, IMAGENET_STD
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.anchors import SSD300, Anchors, build_anchors, encode, intersection_over_union
from horovod_volo.dense.box_list import BoxFiles, BoxList, find_boxes, list_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader
from horovod_volo.dense.box_loss import NEGATIVES_PER_POSITIVE, detection_loss
from horovod_volo.dense.box_plan import draw_box_plan

_ALLOWED_DIFFERENCE = 3 / 255  # mean over pixels: decoders and filters round differently
_TOLERANCE = 1e-4
_SETTINGS = Detection()

Scenes = Annotated[int, Flag("scenes to draw")]
Classes = Annotated[int, Flag("number of classes")]
Boxes = Annotated[int, Flag("boxes of an image")]


def measure(*, scenes: Scenes = 64, batch_size: BatchSize = 8, pairs: Pairs = 7) -> Result:
    """Measure epochs of drawn scenes of about 640 x 480 pixels at 300 px."""
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "scenes"
        make_scene_set(root, train=scenes, val=1, side=480)
        files = find_boxes(root, "train")
        images = list_boxes(files, None)
        loader = BoxTrainLoader(
            images,
            Data(batch_size=batch_size),
            _SETTINGS,
            side=SSD300.image_size,
            order=OrderOfRank(SEED, 0, 1, 1),
            device=default_device(),
            threads=threads,
            normalization=IMAGENET_NORMALIZATION,
        )
        with closing(loader):
            batches = list(loader.batches(EPOCH, 0))
            for batch in batches:
                _assert_same(batch.images, pillow_images(images, batch.indices.tolist()))
            count = sum(len(batch.indices) for batch in batches)

            def ours() -> None:
                for _ in loader.batches(EPOCH, 0):
                    pass

            def pillow() -> None:
                for batch in batches:
                    pillow_images(images, batch.indices.tolist())

            of_pillow = alternate(_cpu_seconds(ours, count), _cpu_seconds(pillow, count), pairs)
            dali = _dali_epoch(files, batch_size, threads, count // batch_size)
            of_dali = alternate(_cpu_seconds(ours, count), _cpu_seconds(dali, count), pairs)
    figures = [
        Figure.of_rate("loader, images a second of CPU", of_pillow.ours),
        Figure.of_rate("Pillow, images a second of CPU", of_pillow.peer),
        Figure.of("faster than Pillow", of_pillow.ratios, "x"),
        Figure.of_rate("DALI's own operators, images a second of CPU", of_dali.peer),
        Figure.of("faster than DALI's own operators", of_dali.ratios, "x"),
    ]
    return Result("boxes", f"images of {SSD300.image_size} px with boxes, data threads: {threads}", figures)


def _cpu_seconds(action: Callable[[], None], images: int) -> Callable[[], float]:
    def block() -> float:
        began = process_time()
        action()
        return (process_time() - began) / images

    return block


def _dali_epoch(files: BoxFiles, batch: int, threads: int, steps: int) -> Callable[[], None]:
    """Return an action that makes an epoch of batches with the pipeline of SSD's reference."""
    pipeline = reference_pipeline(files.images, files.annotations, batch=batch, threads=threads)

    def run() -> None:
        for _ in range(steps):
            images, *_ = pipeline.run()
            torch.utils.dlpack.from_dlpack(images.as_tensor())

    return run


def pillow_images(images: BoxList, indices: list[int]) -> Tensor:
    """Return images as a plain loop with Pillow and numpy makes them: cut, scaled, flipped, coloured."""
    side = SSD300.image_size
    found = torch.zeros(len(indices), 3, side, side)
    mean, std = (np.array(values, dtype=np.float32) for values in (IMAGENET_MEAN, IMAGENET_STD))
    for place, index in enumerate(indices):
        boxes, _ = images.boxes_to_learn(index)
        image = decoded_rgb(images.read(index).data)
        plan = draw_box_plan(_SETTINGS, (image.height, image.width), boxes, SEED, EPOCH, index)
        top, left, height, width = plan.window
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((side, side), Image.Resampling.BILINEAR)
        if plan.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        change = plan.colors.affine()
        image = image.convert("RGB", tuple(change.ravel().tolist()))
        pixels = (np.asarray(image, dtype=np.float32) / 255 - mean) / std
        found[place] = torch.from_numpy(pixels.transpose(2, 0, 1))
    return found


def _assert_same(ours: Tensor, pillow: Tensor) -> None:
    difference = float((ours.cpu() - pillow).abs().mean()) * min(IMAGENET_STD)
    if difference > _ALLOWED_DIFFERENCE:
        raise WrongResultError(f"images differ by {difference:.3g}")


class EncodedImage(NamedTuple):
    """The targets of one image."""

    boxes: Tensor  # (anchors, 4) encoded
    classes: Tensor  # (anchors,)


def encode_one(boxes: Tensor, classes: Tensor, anchors: Anchors) -> EncodedImage:
    """Return the targets of one image, as SSD's reference computes them image by image."""
    overlaps = intersection_over_union(boxes, anchors.corners)  # (boxes, anchors)
    best_of_anchor, matches = overlaps.max(dim=0)
    # Of equally good anchors the last one, as in `encode`.
    best_of_box = overlaps.shape[1] - 1 - overlaps.flip(1).argmax(dim=1)
    for number, anchor in enumerate(best_of_box.tolist()):
        best_of_anchor[anchor], matches[anchor] = 2.0, number
    positive = best_of_anchor > 0.5
    matched = boxes[matches]
    centres, sizes = (matched[:, :2] + matched[:, 2:]) / 2, matched[:, 2:] - matched[:, :2]
    offsets = 10 * (centres - anchors.centres[:, :2]) / anchors.centres[:, 2:]
    scales = 5 * (sizes / anchors.centres[:, 2:]).log()
    encoded = torch.cat([offsets, scales], dim=1)
    return EncodedImage(encoded.where(positive[:, None], 0.0), classes[matches].where(positive, 0))


def measure_loss(
    *, batch_size: BatchSize = 32, classes: Classes = 80, boxes: Boxes = 8, pairs: Pairs = 7
) -> Result:
    """Measure targets and loss of SSD300, forward and backward, against encoding image by image."""
    device, anchors = default_device(), build_anchors(SSD300, default_device())
    random = torch.Generator().manual_seed(SEED)
    corners = torch.rand(batch_size, boxes, 2, 2, generator=random).sort(dim=2).values
    truth = corners.flatten(2).to(device)
    kinds = torch.randint(1, classes + 1, (batch_size, boxes), generator=random).to(device)
    count = len(anchors.centres)
    values = torch.randn(batch_size, count, 4, generator=random).to(device).requires_grad_()
    logits = torch.randn(batch_size, count, classes + 1, generator=random).to(device).requires_grad_()

    def ours() -> Tensor:
        loss = detection_loss(values, logits, encode(truth, kinds, anchors)).total
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, (values, logits))])

    def plain() -> Tensor:
        targets = [encode_one(*each, anchors) for each in zip(truth, kinds, strict=True)]
        encoded, labels = (torch.stack(parts) for parts in zip(*targets, strict=True))
        loss = _plain_loss(values, logits, encoded, labels)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, (values, logits))])

    assert_agree("gradients", ours(), plain(), _TOLERANCE)
    found = compare(ours, plain, device, pairs)
    memory = [peak_extra_bytes(each, device) / 2**20 for each in (ours, plain)]
    figures = [
        Figure.of_seconds("batched", found.ours),
        Figure.of_seconds("image by image", found.peer),
        Figure.of("faster than image by image", found.ratios, "x"),
        Figure("peak memory, batched", memory[0], "MiB"),
        Figure("peak memory, image by image", memory[1], "MiB"),
    ]
    title = f"targets and loss of {batch_size} x {classes} classes x {count:,} anchors, {device.type}"
    return Result("box_loss", title, figures)


def _plain_loss(values: Tensor, logits: Tensor, encoded: Tensor, labels: Tensor) -> Tensor:
    """Return SSD's loss with the ranks of negatives from two sorts, logits as (batch, classes, anchors)."""
    positive = labels > 0
    positives = positive.sum(dim=1)
    distances = (F.smooth_l1_loss(values, encoded, reduction="none").sum(dim=2) * positive).sum(dim=1)
    entropies = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    _, order = entropies.detach().masked_fill(positive, 0.0).sort(dim=1, descending=True)
    _, ranks = order.sort(dim=1)
    hard = ranks < (NEGATIVES_PER_POSITIVE * positives).clamp(max=labels.shape[1]).unsqueeze(1)
    of_classes = (entropies * (positive.float() + hard.float())).sum(dim=1)
    used = (positives > 0).float()
    return ((distances + of_classes) * used / positives.clamp(min=1)).mean()
