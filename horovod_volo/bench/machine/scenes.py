"""Segmentation: crops of images and masks per second, and the loss of pixels, against plain forms of both.

Both feeds take the same crops of the same scenes. CPU seconds are compared, as for classification.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path
from time import process_time
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, Flag, ImgSize, Pairs
from horovod_volo.bench.comparison import (
    WrongResultError,
    alternate,
    assert_agree,
    compare,
    default_device,
    peak_extra_bytes,
)
from horovod_volo.bench.machine.data import EPOCH, SEED
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Segmentation
from horovod_volo.core.batch import IGNORED, SceneBatch
from horovod_volo.data.images.image_bytes import decoded_rgb, open_image
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_NORMALIZATION, IMAGENET_STD
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.pixel_loss import pixel_cross_entropy
from horovod_volo.dense.scene_list import SceneList, find_layout, list_scenes
from horovod_volo.dense.scene_loader import SceneTrainLoader
from horovod_volo.dense.scene_plan import draw_plan

_ALLOWED_DIFFERENCE = 4 / 255  # mean over pixels: decoders and filters round differently
_OTHER_LABELS = 2e-3  # where a pixel of the crop lies between two pixels of the mask
_TOLERANCE = 1e-4

Classes = Annotated[int, Flag("number of classes")]
Scenes = Annotated[int, Flag("scenes to draw")]


def measure(
    *, scenes: Scenes = 48, img_size: ImgSize = 512, batch_size: BatchSize = 4, pairs: Pairs = 7
) -> Result:
    """Measure epochs of drawn scenes, without distorted colours, against Pillow in one thread."""
    settings = Segmentation(photometric=False)
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "scenes"
        make_scene_set(root, train=scenes, val=1, side=img_size)
        listed = list_scenes(root, find_layout(root), "train")
        loader = SceneTrainLoader(
            listed,
            Data(batch_size=batch_size),
            settings,
            side=img_size,
            order=OrderOfRank(SEED, 0, 1, 1),
            device=default_device(),
            threads=threads,
            normalization=IMAGENET_NORMALIZATION,
        )
        with closing(loader):
            batches = list(loader.batches(EPOCH, 0))
            for batch in batches:
                _assert_same(batch, pillow_batch(listed, settings, batch.indices.tolist(), img_size))
            images = sum(len(batch.indices) for batch in batches)

            def ours() -> float:
                began = process_time()
                for _ in loader.batches(EPOCH, 0):
                    pass
                return (process_time() - began) / images

            def pillow() -> float:
                began = process_time()
                for batch in batches:
                    pillow_batch(listed, settings, batch.indices.tolist(), img_size)
                return (process_time() - began) / images

            found = alternate(ours, pillow, pairs)
    figures = [
        Figure.of_rate("loader, images a second of CPU", found.ours),
        Figure.of_rate("Pillow, images a second of CPU", found.peer),
        Figure.of("faster than Pillow", found.ratios, "x"),
    ]
    return Result("scenes", f"crops of {img_size} px with masks, data threads: {threads}", figures)


def pillow_batch(
    scenes: SceneList, settings: Segmentation, indices: list[int], side: int
) -> tuple[Tensor, Tensor]:
    """Return images and masks as a plain loop with Pillow makes them: scaled, cut, flipped, normalised."""
    images = torch.zeros(len(indices), 3, side, side)
    masks = np.full((len(indices), side, side), IGNORED, dtype=np.uint8)
    mean, std = (np.array(values, dtype=np.float32) for values in (IMAGENET_MEAN, IMAGENET_STD))
    for place, index in enumerate(indices):
        image, mask = decoded_rgb(scenes.read(index).data), open_image(scenes.encoded_mask(index))
        plan = draw_plan(settings, side, np.asarray(mask), SEED, EPOCH, index)
        scaled = (plan.scaled[1], plan.scaled[0])
        factors = (image.width / scaled[0], 0, 0, 0, image.height / scaled[1], 0)
        image = image.transform(scaled, Image.Transform.AFFINE, factors, Image.Resampling.BILINEAR)
        mask = mask.resize(scaled, Image.Resampling.NEAREST)
        (top, left), (height, width) = plan.corner, plan.shape
        box = (left, top, left + width, top + height)
        pixels, classes = np.asarray(image.crop(box)), np.asarray(mask.crop(box))
        if plan.flip:
            pixels, classes = pixels[:, ::-1], classes[:, ::-1]
        normalised = (pixels.astype(np.float32) / 255 - mean) / std
        images[place, :, :height, :width] = torch.from_numpy(normalised.transpose(2, 0, 1))
        masks[place, :height, :width] = classes
    return images, torch.from_numpy(masks)


def _assert_same(batch: SceneBatch, other: tuple[Tensor, Tensor]) -> None:
    images, masks = other
    difference = float((batch.images.cpu() - images).abs().mean()) * min(IMAGENET_STD)
    different = float((batch.masks.cpu() != masks).float().mean())
    if difference > _ALLOWED_DIFFERENCE or different > _OTHER_LABELS:
        raise WrongResultError(f"images differ by {difference:.3g}, and {different:.3g} of the labels")


def measure_loss(
    *, img_size: ImgSize = 512, batch_size: BatchSize = 4, classes: Classes = 150, pairs: Pairs = 7
) -> Result:
    """Measure forward and backward from logits at a quarter of the side, against resizing the whole batch."""
    device = default_device()
    random = torch.Generator().manual_seed(SEED)
    side = img_size // 4
    logits = torch.randn(batch_size, classes, side, side, generator=random).to(device).requires_grad_()
    masks = torch.randint(classes, (batch_size, img_size, img_size), generator=random, dtype=torch.uint8).to(
        device
    )
    masks[:, : img_size // 8] = IGNORED

    def ours() -> Tensor:
        (gradient,) = torch.autograd.grad(pixel_cross_entropy(logits, masks), logits)
        return gradient

    def plain() -> Tensor:
        resized = F.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
        loss = F.cross_entropy(resized, masks.long(), ignore_index=IGNORED, reduction="sum") / masks.numel()
        (gradient,) = torch.autograd.grad(loss, logits)
        return gradient

    assert_agree("gradients", ours(), plain(), _TOLERANCE)
    found = compare(ours, plain, device, pairs)
    memory = [peak_extra_bytes(each, device) / 2**20 for each in (ours, plain)]
    figures = [
        Figure.of_seconds("image by image", found.ours),
        Figure.of_seconds("whole batch", found.peer),
        Figure.of("faster than the whole batch", found.ratios, "x"),
        Figure("peak memory, image by image", memory[0], "MiB"),
        Figure("peak memory, whole batch", memory[1], "MiB"),
    ]
    title = f"loss of {batch_size} x {classes} classes x {img_size} px, forward and backward, {device.type}"
    return Result("pixel_loss", title, figures)
