"""The batches a rank trains on and is evaluated with.

Every batch is a pure function of (seed, epoch, step, rank, number of ranks): a stream holds no
position between passes, so a resumed run sees the pixels that the interrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops, relative_boxes
from horovod_volo.data.augmentation.geometric_ops import moved_frames, moved_maps
from horovod_volo.data.augmentation.rand_augment import draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.augmentation.whole_image import parts_needed
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.center_crop import crop_corners, resized_shapes
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import MapGeometry
from horovod_volo.data.labels.published_maps import flipped
from horovod_volo.data.labels.source import LabelSource
from horovod_volo.data.pipeline import (
    IMAGENET_COLOURS,
    Colours,
    build_eval_pipeline,
    build_train_pipeline,
    resizing_inputs,
)
from horovod_volo.data.prefetcher import AugmentParams, BatchPrefetcher, Labels, PendingBatch
from horovod_volo.data.reading import read_image, read_present
from horovod_volo.data.sampler import epoch_order, rank_indices
from horovod_volo.data.thread_pool import ImageThreadPool
from horovod_volo.data.train_transform import TrainTransform

NO_CLASS = -1


@dataclass(frozen=True, eq=False)
class Batch:
    """What one pass sees; the tensors lie on the rank's device, the indices on the host."""

    images: torch.Tensor  # (batch, 3, side, side) float32, normalised
    classes: torch.Tensor  # (batch,) int64; NO_CLASS where a damaged image was to be evaluated
    indices: NDArray[np.int64]  # (batch,) places in the catalog
    scores: torch.Tensor | None  # (batch, k, height, width) float16 logits, flipped like the image
    ids: torch.Tensor | None  # (batch, k, height, width) int32 class numbers of the scores
    boxes: torch.Tensor | None  # (batch, 4) float32 top, left, height, width as fractions of the flipped map
    reach: float = 1.0  # the largest height or width of the boxes, 1 or more


class Sample(NamedTuple):
    """One image and its label map, as read."""

    encoded: NDArray[np.uint8]
    size: tuple[int, int]  # height, width
    label_map: tuple[NDArray[np.float16], NDArray[np.integer[Any]]] | None


class TrainLoader:
    """This rank's training batches, of any epoch, from any step on."""

    def __init__(
        self,
        catalog: Catalog,
        label_maps: LabelSource | None,
        settings: Data,
        *,
        image_size: int,
        seed: int,
        rank: int,
        size: int,
        accumulation: int,
        device: torch.device,
        threads: int,
        colours: Colours = IMAGENET_COLOURS,
    ) -> None:
        self.waited_seconds = 0.0  # how long the caller has stood still for its batches
        self.steps = len(catalog) // (size * settings.batch_size * accumulation)  # whole global batches
        self.damage = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self._catalog = catalog
        self._label_maps = label_maps
        self._settings = settings
        self._seed = seed
        self._share = partial(
            rank_indices, rank=rank, size=size, batch=settings.batch_size, accumulation=accumulation
        )
        self._device = device
        self._image_size = image_size
        self._readers = ImageThreadPool(threads, "file-reader")
        self._cutters = ImageThreadPool(threads, "image-cutter")
        # On the CPU torch resizes faster; what is augmented before the crop is resized after it.
        self._resized_by_dali = device.type == "cuda" and settings.randaugment_on == "crop"
        self._conveyor = BatchPrefetcher(
            partial(
                build_train_pipeline,
                image_size=image_size,
                batch=settings.batch_size,
                device=device,
                threads=threads,
                resize=self._resized_by_dali,
            ),
            device,
            settings.prefetch,
            lambda index: self.damage.cannot_decode(index, catalog.location(index)),
            TrainTransform(
                settings,
                image_size=image_size,
                seed=seed,
                device=device,
                resized=self._resized_by_dali,
                cutters=self._cutters,
                colours=colours,
            ),
        )

    def batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from `first_step` on, as many for each step as it has passes."""
        with closing(self._conveyor.carry(self._loads(epoch, first_step))) as carried:
            while True:
                began = perf_counter()
                arrived = next(carried, None)
                batch = None if arrived is None else _batch(*arrived, self._catalog, self._device)
                self.waited_seconds += perf_counter() - began
                if batch is None:
                    return
                yield batch

    def close(self) -> None:
        """End all threads; batches already handed out stay valid."""
        self._conveyor.close()
        self._readers.close()
        self._cutters.close()

    def _loads(self, epoch: int, first_step: int) -> Iterator[Callable[[], PendingBatch]]:
        settings = self._settings
        order = epoch_order(
            self._seed,
            epoch,
            len(self._catalog),
            block=settings.block_shuffle,
            window=settings.shuffle_window,
        )
        for step in range(first_step, self.steps):
            for indices in self._share(order, step):
                yield partial(self._load, epoch, indices)

    def _load(self, epoch: int, wanted: NDArray[np.int64]) -> PendingBatch:
        read = self._readers.map(self._read_usable, wanted.tolist())
        indices = np.array([index for index, _ in read], dtype=np.int64)
        samples = [sample for _, sample in read]
        sizes = np.array([sample.size for sample in samples], dtype=np.int64)
        # What stands in for a damaged image undergoes what that one would have: no image is seen twice alike.
        plan = draw_crops(self._seed, epoch, wanted, sizes, self._settings)
        operations = draw_operations(self._seed, epoch, wanted, self._settings)
        whole = self._settings.randaugment_on == "image"
        parts = parts_needed(plan.boxes, sizes, operations) if whole else None
        boxes = plan.stored(plan.boxes if parts is None else parts.decoded, sizes)
        inputs = ([sample.encoded for sample in samples], list(boxes[:, :2]), list(boxes[:, 2:]))
        if self._resized_by_dali:
            inputs += resizing_inputs(plan)
        treatment = AugmentParams(
            plan,
            operations,
            draw_erasures(self._seed, epoch, wanted, self._settings, self._image_size),
            parts,
        )
        maps = self._label_maps
        labels = None if maps is None else _labels(samples, sizes, treatment, maps.geometry)
        return PendingBatch(indices, partial(self._load, epoch, wanted), inputs, labels, treatment)

    def _read_usable(self, index: int) -> tuple[int, Sample]:
        return self.damage.first_usable(index, len(self._catalog), self._read)

    def _read(self, index: int) -> Sample:
        encoded, size = read_image(self._catalog, index)
        label_map = None if self._label_maps is None else self._label_maps.read(index)
        return Sample(encoded, size, label_map)


def _labels(
    samples: list[Sample], sizes: NDArray[np.int64], treatment: AugmentParams, geometry: MapGeometry
) -> Labels:
    plan, operations = treatment.plan, treatment.operations
    turned = [
        flipped(*sample.label_map, horizontal, vertical)
        for sample, horizontal, vertical in zip(
            samples, plan.flip_horizontal, plan.flip_vertical, strict=True
        )
        if sample.label_map is not None
    ]
    scores = np.stack([scores for scores, _ in turned])  # (batch, k, height, width)
    ids = np.stack([ids for _, ids in turned])  # same
    covered = geometry.covered(sizes)
    boxes = plan.fractions(sizes, covered)
    frames = moved_frames(boxes, operations.moving)
    whole = treatment.parts is not None
    canvases, canvas_sizes = (plan.whole_images(covered), sizes) if whole else (boxes, 1.0)
    moved = moved_maps(scores, ids, canvases, operations, canvas_sizes, frames)
    return Labels(*moved, relative_boxes(boxes, frames))


class EvalLoader:
    """This rank's share of the evaluation images; over all ranks each image comes exactly once."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Data,
        *,
        image_size: int,
        crop_pct: float,
        rank: int,
        size: int,
        device: torch.device,
        threads: int,
        colours: Colours = IMAGENET_COLOURS,
        interpolation: str = "bicubic",
    ) -> None:
        self.damage = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self._catalog = catalog
        self._image_size = image_size
        self._crop_pct = crop_pct
        self._batch = settings.eval_batch_size or settings.batch_size
        self._share = np.arange(rank, len(catalog), size, dtype=np.int64)
        self._device = device
        self._readers = ImageThreadPool(threads, "file-reader")
        self._conveyor = BatchPrefetcher(
            partial(
                build_eval_pipeline,
                interpolation=interpolation,
                image_size=image_size,
                batch=self._batch,
                device=device,
                threads=threads,
                colours=colours,
            ),
            device,
            settings.prefetch,
            lambda index: self.damage.cannot_decode(index, catalog.location(index)),
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the share once, in the catalog's order; the last batch may be short."""
        with closing(self._conveyor.carry(self._loads())) as carried:
            for load, images in carried:
                yield _batch(load, images, self._catalog, self._device)

    def close(self) -> None:
        """End all threads; batches already handed out stay valid."""
        self._conveyor.close()
        self._readers.close()

    def _loads(self) -> Iterator[Callable[[], PendingBatch]]:
        for first in range(0, len(self._share), self._batch):
            yield partial(self._load, self._share[first : first + self._batch])

    def _load(self, indices: NDArray[np.int64]) -> PendingBatch:
        encoded, sizes, absent = read_present(indices, self._catalog, self.damage, self._readers)
        resized = resized_shapes(sizes, self._image_size, self._crop_pct)
        corners = crop_corners(resized, self._image_size)
        inputs = (encoded, list(resized.astype(np.float32)), list(corners.astype(np.int32)))
        return PendingBatch(indices, partial(self._load, indices), inputs, absent=absent)


def _batch(load: PendingBatch, images: torch.Tensor, catalog: Catalog, device: torch.device) -> Batch:
    labels = load.labels
    return Batch(
        images=images,
        classes=_on_device(_classes(load, catalog), device),
        indices=load.indices,
        scores=None if labels is None else _on_device(labels.scores, device),
        ids=None if labels is None else _on_device(labels.ids, device),
        boxes=None if labels is None else _on_device(labels.boxes, device),
        reach=1.0 if labels is None else max(1.0, float(labels.boxes[:, 2:].max())),
    )


def _classes(load: PendingBatch, catalog: Catalog) -> NDArray[np.int64]:
    classes = catalog.targets[load.indices].astype(np.int64)
    return classes if load.absent is None else np.where(load.absent, NO_CLASS, classes)


def _on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # the host goes on while the copy runs
