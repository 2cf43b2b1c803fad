"""The batches a rank trains on and is evaluated with.

Every batch is a pure function of (seed, epoch, step, rank, number of ranks): a stream holds no
position between passes, so a resumed run sees the pixels that the interrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Data
from horovod_volo.data.catalog import Catalog
from horovod_volo.data.conveyor import Conveyor, Labels, Load, Treatment
from horovod_volo.data.erasing import draw_erasures
from horovod_volo.data.finishing import Finisher
from horovod_volo.data.label_maps import Ids, LabelMaps, flipped
from horovod_volo.data.moving import moved_maps
from horovod_volo.data.order import epoch_order, share_of_step
from horovod_volo.data.pipeline import build_eval_pipeline, build_train_pipeline, resizing_inputs
from horovod_volo.data.plan import plan_batch
from horovod_volo.data.rand_augment import draw_operations
from horovod_volo.data.reading import read_images
from horovod_volo.data.window import resized_sizes, window_corners


@dataclass(frozen=True, eq=False)
class Batch:
    """What one pass sees; the tensors lie on the rank's device, the indices on the host."""

    images: torch.Tensor  # (batch, 3, side, side) float32, normalised
    classes: torch.Tensor  # (batch,) int64
    indices: NDArray[np.int64]  # (batch,) places in the catalog
    scores: torch.Tensor | None  # (batch, k, height, width) float16 logits, flipped like the image
    ids: torch.Tensor | None  # (batch, k, height, width) int32 class numbers of the scores
    boxes: torch.Tensor | None  # (batch, 4) float32 top, left, height, width as shares of the flipped image


class TrainStream:
    """This rank's training batches, of any epoch, from any step on."""

    def __init__(
        self,
        catalog: Catalog,
        label_maps: LabelMaps | None,
        settings: Data,
        *,
        image_size: int,
        seed: int,
        rank: int,
        size: int,
        accumulation: int,
        device: torch.device,
        threads: int,
    ) -> None:
        self.waited_seconds = 0.0  # how long the caller has stood still for its batches
        self.steps = len(catalog) // (size * settings.batch_size * accumulation)  # whole global batches
        self._catalog = catalog
        self._label_maps = label_maps
        self._settings = settings
        self._seed = seed
        self._share = partial(
            share_of_step, rank=rank, size=size, batch=settings.batch_size, accumulation=accumulation
        )
        self._device = device
        self._image_size = image_size
        self._readers = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="file-reader")
        self._cutters = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="image-cutter")
        self._resized_by_dali = device.type == "cuda"  # on the CPU torch resizes faster
        self._conveyor = Conveyor(
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
            Finisher(
                settings,
                image_size=image_size,
                seed=seed,
                device=device,
                resized=self._resized_by_dali,
                cutters=self._cutters,
            ),
        )

    def passes(self, epoch: int, first_step: int) -> Iterator[Batch]:
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
        self._readers.shutdown(cancel_futures=True)
        self._cutters.shutdown(cancel_futures=True)

    def _loads(self, epoch: int, first_step: int) -> Iterator[Callable[[], Load]]:
        order = epoch_order(self._seed, epoch, len(self._catalog))
        for step in range(first_step, self.steps):
            for indices in self._share(order, step):
                yield partial(self._load, epoch, indices)

    def _load(self, epoch: int, indices: NDArray[np.int64]) -> Load:
        files = _files(self._catalog, indices)
        encoded, sizes = read_images(files, self._readers)
        plan = plan_batch(self._seed, epoch, indices, sizes, self._settings)
        boxes = plan.stored_boxes(sizes)
        inputs = (encoded, list(boxes[:, :2]), list(boxes[:, 2:]))
        if self._resized_by_dali:
            inputs += resizing_inputs(plan)
        treatment = Treatment(
            plan,
            draw_operations(self._seed, epoch, indices, self._settings),
            draw_erasures(self._seed, epoch, indices, self._settings, self._image_size),
        )
        labels = None
        if self._label_maps is not None:
            labels = self._read_labels(self._label_maps, indices, sizes, treatment)
        return Load(indices, files, inputs, labels, treatment)

    def _read_labels(
        self,
        label_maps: LabelMaps,
        indices: NDArray[np.int64],
        sizes: NDArray[np.int64],
        treatment: Treatment,
    ) -> Labels:
        plan = treatment.plan
        paths = [self._catalog.paths[index] for index in indices]
        maps = list(self._readers.map(label_maps.read, paths))
        self._check_maps(paths, [ids for _, ids in maps])
        turned = [
            flipped(scores, ids, horizontal, vertical)
            for (scores, ids), horizontal, vertical in zip(
                maps, plan.flip_horizontal, plan.flip_vertical, strict=True
            )
        ]
        boxes = plan.fractions(sizes)
        scores = np.stack([scores for scores, _ in turned])  # (batch, k, height, width)
        ids = np.stack([ids for _, ids in turned])  # same
        return Labels(*moved_maps(scores, ids, boxes, treatment.operations), boxes)

    def _check_maps(self, paths: list[str], maps: list[Ids]) -> None:
        classes = len(self._catalog.classes)
        for path, ids in zip(paths, maps, strict=True):
            if ids.shape != maps[0].shape:
                raise UserError(
                    f"the label map of {path} has the shape {ids.shape}, that of {paths[0]} has "
                    f"{maps[0].shape}. Make all maps with one size."
                )
            if ids.max() >= classes:
                raise UserError(
                    f"the label map of {path} names class {ids.max()}, but there are {classes} class "
                    "folders: it was made for other classes. Make the maps for these."
                )


class EvalStream:
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
    ) -> None:
        self._catalog = catalog
        self._image_size = image_size
        self._crop_pct = crop_pct
        self._batch = settings.eval_batch_size or settings.batch_size
        self._share = np.arange(rank, len(catalog), size, dtype=np.int64)
        self._device = device
        self._readers = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="file-reader")
        self._conveyor = Conveyor(
            partial(
                build_eval_pipeline, image_size=image_size, batch=self._batch, device=device, threads=threads
            ),
            device,
            settings.prefetch,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the share once, in the catalog's order; the last batch may be short."""
        with closing(self._conveyor.carry(self._loads())) as carried:
            for load, images in carried:
                yield _batch(load, images, self._catalog, self._device)

    def close(self) -> None:
        """End all threads; batches already handed out stay valid."""
        self._conveyor.close()
        self._readers.shutdown(cancel_futures=True)

    def _loads(self) -> Iterator[Callable[[], Load]]:
        for first in range(0, len(self._share), self._batch):
            yield partial(self._load, self._share[first : first + self._batch])

    def _load(self, indices: NDArray[np.int64]) -> Load:
        files = _files(self._catalog, indices)
        encoded, sizes = read_images(files, self._readers)
        resized = resized_sizes(sizes, self._image_size, self._crop_pct)
        corners = window_corners(resized, self._image_size)
        inputs = (encoded, list(resized.astype(np.float32)), list(corners.astype(np.int32)))
        return Load(indices, files, inputs)


def _files(catalog: Catalog, indices: NDArray[np.int64]) -> list[Path]:
    return [catalog.root / catalog.paths[index] for index in indices]


def _batch(load: Load, images: torch.Tensor, catalog: Catalog, device: torch.device) -> Batch:
    labels = load.labels
    return Batch(
        images=images,
        classes=_on_device(catalog.targets[load.indices], device),
        indices=load.indices,
        scores=None if labels is None else _on_device(labels.scores, device),
        ids=None if labels is None else _on_device(labels.ids, device),
        boxes=None if labels is None else _on_device(labels.boxes, device),
    )


def _on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # the host goes on while the copy runs
