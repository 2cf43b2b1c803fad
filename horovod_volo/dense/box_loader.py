"""The batches of images with boxes that a rank trains on.

Invariant: a batch is a pure function of (seed, epoch, step, rank, number of ranks), as for classification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Detection
from horovod_volo.core.batch import BoxBatch, copy_async
from horovod_volo.data.image_decoder import image_decoder
from horovod_volo.data.ordered_batches import OrderedBatches, OrderOfRank
from horovod_volo.data.pipeline import Normalization, resizing_inputs
from horovod_volo.data.prefetcher import BatchPrefetcher, PendingBatch
from horovod_volo.data.thread_pool import ImageThreadPool
from horovod_volo.data.train_transform import resize_pixels
from horovod_volo.dense.box_list import BoxList, ImageBoxes, read_sized
from horovod_volo.dense.box_plan import BoxPlan, draw_box_plan


class BoxTable(NamedTuple):
    """The boxes of a batch; images with fewer than the most have zeros after theirs."""

    boxes: NDArray[np.float32]  # (batch, most, 4) left, top, right, bottom as fractions of the image
    classes: NDArray[np.int64]  # (batch, most) from 1; 0 where there is no box


@dataclass(frozen=True, eq=False)
class PendingBoxBatch(PendingBatch):
    """A batch of images with boxes that has been read, but whose images are not decoded."""

    table: BoxTable
    flips: NDArray[np.bool_]  # (batch,)
    colors: NDArray[np.float32]  # (batch, 3, 4) affine maps of the colours
    drawn: NDArray[np.int64]  # (batch,) the images that were to be read; damaged ones are replaced


class BoxTrainLoader(OrderedBatches[PendingBoxBatch, BoxBatch]):
    """This rank's training batches for detection."""

    def __init__(
        self,
        images: BoxList,
        settings: Data,
        plan_settings: Detection,
        *,
        side: int,
        order: OrderOfRank,
        device: torch.device,
        threads: int,
        normalization: Normalization,
    ) -> None:
        super().__init__(len(images), settings, order, threads)
        self._images, self._plan_settings, self._side, self._device = images, plan_settings, side, device
        mean, std = (255 * torch.tensor(values, device=device).view(3, 1) for values in normalization)
        self._mean, self._std = mean, std
        # On the CPU torch resizes faster than DALI.
        decoder = image_decoder(settings.image_decoder)
        self._resized_by_dali = device.type == "cuda" and decoder.name == "dali"
        self._transform_threads = ImageThreadPool(threads, "image-transform")
        self._prefetcher = BatchPrefetcher(
            partial(
                decoder.build_train_pipeline,
                image_size=side,
                batch=settings.batch_size,
                device=device,
                threads=threads,
                resize=self._resized_by_dali,
            ),
            device,
            settings.prefetch,
            lambda index: self.bad_samples.add_undecodable(index, images.location(index)),
            self._transform,
            decoder.undecodable,
        )

    def close(self) -> None:
        """End all threads; batches that were yielded stay valid."""
        super().close()
        self._transform_threads.close()

    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> PendingBoxBatch:
        # A replacement is augmented as the damaged image would have been.
        prepared = self._readers.map(partial(self._prepare, epoch), drawn.tolist())
        plans = [plan for _, _, plan, _ in prepared]
        inputs: tuple[list[NDArray[Any]], ...] = (
            [encoded for _, encoded, _, _ in prepared],
            [np.array(plan.window[:2], dtype=np.int32) for plan in plans],
            [np.array(plan.window[2:], dtype=np.int32) for plan in plans],
        )
        flips = np.array([plan.flip for plan in plans])
        if self._resized_by_dali:
            inputs += resizing_inputs(flips, np.zeros_like(flips), np.zeros_like(flips))
        indices = np.array([index for index, *_ in prepared], dtype=np.int64)
        colors = np.stack([plan.colors.affine() for plan in plans]).astype(np.float32)
        table = _table([moved for *_, moved in prepared])
        return PendingBoxBatch(indices, inputs, table, flips, colors, drawn)

    def _prepare(self, epoch: int, sample: int) -> tuple[int, NDArray[np.uint8], BoxPlan, ImageBoxes]:
        """Read an image or its replacement, draw its plan, and move its boxes."""
        read = partial(read_sized, self._images)
        index, (encoded, size) = self.bad_samples.read_or_replace(sample, self._samples, read)
        boxes, classes = self._images.boxes_to_learn(index)
        plan = draw_box_plan(self._plan_settings, size, boxes, self._seed, epoch, sample)
        moved, stay = plan.move(boxes)
        return index, encoded, plan, ImageBoxes(moved[stay], classes[stay])

    def _transform(self, pending: PendingBoxBatch, decoded: Any) -> Tensor:
        """Return the images (batch, 3, side, side) with their colours changed, normalised."""
        maps = copy_async(pending.colors, self._device)  # (batch, 3, 4)
        # Normalising is one more affine map: both are one product, clipped to what 0 and 255 become.
        matrix, added = maps[:, :, :3] / self._std, (maps[:, :, 3:] - self._mean) / self._std
        low, high = -self._mean / self._std, (255 - self._mean) / self._std
        images = torch.empty(len(matrix), 3, self._side, self._side, device=self._device)
        flat = images.flatten(2)
        if self._resized_by_dali:
            # A view of DALI's memory, valid until its next run.
            pixels = torch.utils.dlpack.from_dlpack(decoded.as_tensor())  # (batch, side, side, 3) uint8
            torch.baddbmm(added, matrix, pixels.float().flatten(1, 2).transpose(1, 2), out=flat)
            flat.clamp_(low, high)
            return images
        windows = [torch.utils.dlpack.from_dlpack(decoded[number]) for number in range(len(decoded))]

        def transform(number: int) -> None:
            """Do all work on one image while it is in a core's own cache."""
            pixels = resize_pixels(windows[number].permute(2, 0, 1)[None], self._side, bicubic=False)[0]
            levels = (pixels.flip(2) if pending.flips[number] else pixels).float().flatten(1)
            torch.addmm(added[number], matrix[number], levels, out=flat[number]).clamp_(low, high)

        self._transform_threads.map(transform, range(len(windows)))
        return images

    def _batch(self, pending: PendingBoxBatch, images: Tensor) -> BoxBatch:
        boxes, classes = (copy_async(each, self._device) for each in pending.table)
        return BoxBatch(images, boxes, classes, pending.indices, pending.drawn)


def _table(images: list[ImageBoxes]) -> BoxTable:
    most = max(1, *(len(image.boxes) for image in images))
    boxes = np.zeros((len(images), most, 4), dtype=np.float32)
    classes = np.zeros((len(images), most), dtype=np.int64)
    for number, image in enumerate(images):
        boxes[number, : len(image.boxes)] = image.boxes
        classes[number, : len(image.boxes)] = image.classes + 1
    return BoxTable(boxes, classes)
