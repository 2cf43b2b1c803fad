"""The batches that a rank trains on and is evaluated with.

Invariant: a batch is a pure function of (seed, epoch, step, rank, number of ranks). A loader has no position
to save, so a resumed run sees the same pixels as the interrupted one would have seen.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import NO_CLASS, EvalBatch, Labels, TrainBatch, copy_async
from horovod_volo.core.center_crop import crop_corners, resized_shapes
from horovod_volo.data.augmentation.apply_ops import parts_needed
from horovod_volo.data.augmentation.crop_flip import LabelMap, augmented_maps, draw_crops
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.image_decoder import (
    IMAGENET_NORMALIZATION,
    Input,
    Normalization,
    Source,
    image_decoder,
    resizing_inputs,
)
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.ordered_batches import OrderedBatches, OrderOfRank, announced
from horovod_volo.data.prefetcher import READING_ALONE_SECONDS, BatchPrefetcher, ImageThreadPool, PendingBatch
from horovod_volo.data.reading import Encoded, ImageFiles, Resize, read_image, resized_shape
from horovod_volo.data.sampler import balanced_order, repeated_order
from horovod_volo.data.train_transform import PendingTrainBatch, TrainTransform
from horovod_volo.token_labels.source import LabelSource

_BLACK_PIXEL: Encoded = np.frombuffer(b"P6\n1 1\n255\n\0\0\0", dtype=np.uint8)


class TrainLoader(OrderedBatches[PendingTrainBatch, TrainBatch]):
    """This rank's training batches for classification."""

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
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> None:
        super().__init__(catalog, settings, OrderOfRank(seed, rank, size, accumulation), device, threads)
        self._label_maps, self._image_size = label_maps, image_size
        # On the CPU torch resizes faster than DALI; whole images are resized after their augmentation.
        can_resize = device.type == "cuda" and settings.randaugment_on == "crop"
        self._resized_by_dali = can_resize and self._decoder.name == "dali"
        self._train_transform = TrainTransform(
            settings,
            image_size=image_size,
            seed=seed,
            device=device,
            resized=self._resized_by_dali,
            threads=self._transform_threads,
            normalization=normalization,
        )

    def _pipeline(self, source: Source, **settings: Any) -> Any:
        return self._decoder.build_train_pipeline(
            source, image_size=self._image_size, resize=self._resized_by_dali, **settings
        )

    def _transform(self, pending: PendingTrainBatch, decoded: Any) -> Tensor:
        return self._train_transform(pending, decoded)

    def _batch(self, pending: PendingTrainBatch, images: Tensor) -> TrainBatch:
        return TrainBatch(images, pending.labels.to(self._device), pending.indices, pending.drawn)

    def _order(self, epoch: int) -> NDArray[Any]:
        balance, repeats = self._settings.balance, self._settings.aug_repeats
        if balance:
            return balanced_order(self._seed, epoch, self._images.targets, balance)
        order = super()._order(epoch)
        return repeated_order(order, repeats) if repeats else order

    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> PendingTrainBatch:
        usable = partial(self.bad_samples.read_or_replace, images=self._samples, read=self._read)
        read = self._readers.map(usable, self._positions(drawn).tolist(), READING_ALONE_SECONDS)
        indices = np.array([index for index, _ in read], dtype=np.int64)
        encoded, shapes, label_maps = (
            list(column) for column in zip(*(each for _, each in read), strict=True)
        )
        sizes = np.array(shapes, dtype=np.int64)
        # A replacement is augmented as the damaged image would have been, not as itself in this epoch.
        crop_flip = draw_crops(self._seed, epoch, drawn, sizes, self._settings)
        operations = draw_operations(self._seed, epoch, drawn, self._settings)
        on_whole_images = self._settings.randaugment_on == "image"
        parts = parts_needed(crop_flip.boxes, sizes, operations) if on_whole_images else None
        boxes = crop_flip.stored(crop_flip.boxes if parts is None else parts.decoded, sizes)
        inputs: tuple[Input, ...] = (encoded, *map(np.ascontiguousarray, np.hsplit(boxes, 2)))
        if self._resized_by_dali:
            inputs += resizing_inputs(crop_flip.flip_horizontal, crop_flip.flip_vertical, crop_flip.bicubic)
        erasures = draw_erasures(self._seed, epoch, drawn, self._settings, self._image_size)
        classes = torch.from_numpy(self._images.targets[indices].astype(np.int64))
        maps = None
        if self._label_maps is not None:
            covered = self._label_maps.geometry.covered(sizes)
            maps = augmented_maps(
                label_maps, crop_flip, operations, sizes, covered, on_whole_images=on_whole_images
            )
        labels = Labels(classes, maps)
        return PendingTrainBatch(indices, inputs, labels, drawn, crop_flip, operations, erasures, parts)

    def _read_ahead(self, indices: NDArray[np.int64]) -> None:
        self._images.read_ahead(self._positions(indices))

    def _positions(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        # The numbers of further draws of an image are larger by multiples of all images.
        return drawn % self._samples

    def _read(self, index: int) -> tuple[Encoded, tuple[int, int], LabelMap | None]:
        """Return an encoded image, its height and width, and its label map."""
        encoded, size = read_image(self._images, index)
        return encoded, size, None if self._label_maps is None else self._label_maps.read(index)


@dataclass(frozen=True, eq=False)
class PendingEvalBatch(PendingBatch):
    """A batch of evaluation images that has been read, but not decoded."""

    bad: NDArray[np.bool_]  # (batch,) damaged images; a black one is decoded in their place


class EvalBatches:
    """This rank's images of an evaluation, read and decoded; over all ranks, each is in exactly one batch."""

    def __init__(
        self,
        files: ImageFiles,
        count: int,
        settings: Data,
        *,
        image_size: int,
        resize: Resize,
        rank: int,
        size: int,
        device: torch.device,
        threads: int,
        normalization: Normalization = IMAGENET_NORMALIZATION,
        interpolation: str = "bicubic",
    ) -> None:
        decoder = image_decoder(settings.image_decoder)
        self.bad_samples = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self.batch_size = settings.eval_batch_size or settings.batch_size
        self._indices = np.arange(rank, count, size, dtype=np.int64)
        self._readers = ImageThreadPool(threads, "file-reader")
        self._files, self._resize, self._image_size = files, resize, image_size
        self._prefetcher = BatchPrefetcher[PendingEvalBatch](
            partial(
                decoder.build_eval_pipeline,
                interpolation=interpolation,
                image_size=image_size,
                batch=self.batch_size,
                device=device,
                threads=threads,
                normalization=normalization,
            ),
            device,
            settings.prefetch,
            lambda index: self.bad_samples.add_undecodable(index, files.location(index)),
            undecodable=decoder.undecodable,
        )

    def decoded(self, indices: NDArray[np.int64] | None = None) -> Generator[tuple[PendingEvalBatch, Tensor]]:
        """Yield batches of `indices` (None: all of this rank's) and their normalised images, in order."""
        reads = self._reads(self._indices if indices is None else indices)
        with closing(self._prefetcher.batches(reads)) as decoded:
            yield from decoded

    def close(self) -> None:
        """End all threads; batches that were yielded stay valid."""
        self._prefetcher.close()
        self._readers.close()

    def _reads(self, indices: NDArray[np.int64]) -> Iterator[Callable[[], PendingEvalBatch]]:
        firsts = range(0, len(indices), self.batch_size)
        batches = (indices[first : first + self.batch_size] for first in firsts)
        for batch in announced(batches, self._read_ahead):
            yield partial(self._read_batch, batch)

    def _read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Begin to read the images of a batch, where that saves time."""

    def _read_batch(self, indices: NDArray[np.int64]) -> PendingEvalBatch:
        read = partial(self.bad_samples.read_or_skip, read=self._read)
        samples = self._readers.map(read, indices.tolist(), READING_ALONE_SECONDS)
        black = _BLACK_PIXEL, np.array([self._image_size, self._image_size])
        encoded, shapes = zip(*(sample or black for sample in samples), strict=True)
        resized = np.stack(shapes)
        corners = crop_corners(resized, self._image_size)
        inputs = (list(encoded), list(resized.astype(np.float32)), list(corners.astype(np.int32)))
        return PendingEvalBatch(indices, inputs, np.array([sample is None for sample in samples]))

    def _read(self, index: int) -> tuple[Encoded, NDArray[np.int64]]:
        encoded, size = read_image(self._files, index)
        return encoded, resized_shape(self._files, index, size, self._resize)


class EvalLoader(EvalBatches):
    def __init__(
        self,
        catalog: Catalog,
        settings: Data,
        *,
        image_size: int,
        crop_pct: float,
        crop_mode: str = "center",
        **common: Any,
    ) -> None:
        """`common` are further arguments of EvalBatches."""
        resize = partial(resized_shapes, image_size=image_size, crop_pct=crop_pct, crop_mode=crop_mode)
        super().__init__(catalog, len(catalog), settings, image_size=image_size, resize=resize, **common)
        self._catalog, self._device = catalog, common["device"]

    def _read_ahead(self, indices: NDArray[np.int64]) -> None:
        self._catalog.read_ahead(indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        """Yield all batches in the catalog's order; the last one may be shorter."""
        for pending, images in self.decoded():
            targets = self._catalog.targets[pending.indices].astype(np.int64)
            classes = torch.from_numpy(np.where(pending.bad, NO_CLASS, targets))
            yield EvalBatch(images, copy_async(classes, self._device), pending.indices)
