"""The batches of images and masks that a rank trains on, and the images that it is evaluated with.

Invariant: a batch is a pure function of (seed, epoch, step, rank, number of ranks), as for classification.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Segmentation
from horovod_volo.core.batch import IGNORED, SceneBatch, copy_async
from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.image_decoder import image_decoder
from horovod_volo.data.ordered_batches import OrderedBatches, OrderOfRank
from horovod_volo.data.pipeline import Normalization
from horovod_volo.data.prefetcher import BatchPrefetcher, PendingBatch
from horovod_volo.data.reading import decode_rgb, read_image
from horovod_volo.data.thread_pool import ImageThreadPool
from horovod_volo.dense.scene_list import Mask, SceneList
from horovod_volo.dense.scene_plan import ScenePlan, distort, draw_plan


@dataclass(frozen=True, eq=False)
class PendingSceneBatch(PendingBatch):
    """A batch of images with masks that has been read, but whose images are not decoded."""

    masks: NDArray[np.uint8]  # (batch, side, side)
    plans: list[ScenePlan]
    drawn: NDArray[np.int64]  # (batch,) the images that were to be read; damaged ones are replaced


class SceneTrainLoader(OrderedBatches[PendingSceneBatch, SceneBatch]):
    """This rank's training batches for segmentation."""

    def __init__(
        self,
        scenes: SceneList,
        settings: Data,
        plan_settings: Segmentation,
        *,
        side: int,
        order: OrderOfRank,
        device: torch.device,
        threads: int,
        normalization: Normalization,
    ) -> None:
        super().__init__(len(scenes), settings, order, threads)
        self._scenes, self._plan_settings, self._side, self._device = scenes, plan_settings, side, device
        self._transform_threads = ImageThreadPool(threads, "image-transform")
        self._mean = 255 * torch.tensor(normalization.mean, device=device).view(3, 1, 1)
        self._std = 255 * torch.tensor(normalization.std, device=device).view(3, 1, 1)
        decoder = image_decoder(settings.image_decoder)
        self._prefetcher = BatchPrefetcher(
            partial(decoder.build_scene_pipeline, batch=settings.batch_size, device=device, threads=threads),
            device,
            settings.prefetch,
            lambda index: self.bad_samples.add_undecodable(index, scenes.location(index)),
            self._transform,
            decoder.undecodable,
        )

    def close(self) -> None:
        """End all threads; batches that were yielded stay valid."""
        super().close()
        self._transform_threads.close()

    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> PendingSceneBatch:
        read = self._readers.map(
            lambda index: self.bad_samples.read_or_replace(index, self._samples, self._read), drawn.tolist()
        )
        # A replacement is augmented as the damaged image would have been.
        prepare = partial(self._prepare, epoch)
        prepared = self._readers.map(prepare, list(zip(drawn.tolist(), read, strict=True)))
        plans, masks = [plan for plan, _ in prepared], np.stack([mask for _, mask in prepared])
        windows = [
            plan.window((mask.shape[0], mask.shape[1]))
            for plan, (_, (_, mask)) in zip(plans, read, strict=True)
        ]
        inputs: tuple[list[NDArray[Any]], ...] = (
            [encoded for _, (encoded, _) in read],
            [begin for begin, _ in windows],
            [end for _, end in windows],
            [np.array(plan.shape, dtype=np.float32) for plan in plans],
            [np.array(plan.flip, dtype=np.int32) for plan in plans],
        )
        indices = np.array([index for index, _ in read], dtype=np.int64)
        return PendingSceneBatch(indices, inputs, masks, plans, drawn)

    def _read(self, index: int) -> tuple[NDArray[np.uint8], Mask]:
        encoded, size = read_image(self._scenes, index)
        return encoded, self._scenes.read_mask(index, size)

    def _prepare(
        self, epoch: int, drawn: tuple[int, tuple[int, tuple[NDArray[np.uint8], Mask]]]
    ) -> tuple[ScenePlan, Mask]:
        """Draw the plan of an image, and cut its mask; where the image is too small, the mask is padded."""
        sample, (_, (_, mask)) = drawn
        plan = draw_plan(self._plan_settings, self._side, mask, self._seed, epoch, sample)
        padded = np.full((self._side, self._side), IGNORED, dtype=np.uint8)
        window = plan.cut(mask, like_opencv=self._plan_settings.mask_resize == "opencv")
        padded[: window.shape[0], : window.shape[1]] = window
        return plan, padded

    def _transform(self, pending: PendingSceneBatch, decoded: Any) -> Tensor:
        images = torch.zeros(len(decoded), 3, self._side, self._side, device=self._device)
        # Perhaps views of DALI's memory, valid until its next run.
        windows = [torch.utils.dlpack.from_dlpack(decoded[number]) for number in range(len(decoded))]

        def transform(numbered: tuple[int, Tensor]) -> None:
            number, pixels = numbered
            levels = distort(pixels.permute(2, 0, 1).float(), pending.plans[number].distortion)
            height, width = levels.shape[1:]
            torch.sub(levels, self._mean, out=images[number, :, :height, :width]).div_(self._std)

        if images.device.type == "cpu":
            self._transform_threads.map(transform, list(enumerate(windows)))
        else:
            for each in enumerate(windows):
                transform(each)
        return images

    def _batch(self, pending: PendingSceneBatch, images: Tensor) -> SceneBatch:
        masks = copy_async(pending.masks, self._device)
        return SceneBatch(images, masks, pending.indices, pending.drawn)


class Scene(NamedTuple):
    """One image of the evaluation, at its own size."""

    number: int  # in the list
    pixels: Tensor  # (3, height, width) uint8, on the host
    mask: Tensor  # (height, width) uint8, on the host


class SceneEvalLoader:
    """This rank's images of the evaluation, one by one; over all ranks, each is there once."""

    def __init__(self, scenes: SceneList, settings: Data, *, rank: int, size: int, threads: int) -> None:
        self.bad_samples = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self._scenes, self._indices = scenes, range(rank, len(scenes), size)
        self._ahead = settings.prefetch + threads
        self._threads = ThreadPoolExecutor(threads, "scene-reader")

    def __iter__(self) -> Iterator[Scene | None]:
        """Yield all images in the list's order; None for a damaged one."""
        waiting: list[Future[Scene | None]] = []
        for index in self._indices:
            waiting.append(self._threads.submit(self._read_usable, index))
            if len(waiting) > self._ahead:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()

    def close(self) -> None:
        """End all threads."""
        self._threads.shutdown(cancel_futures=True)

    def _read_usable(self, index: int) -> Scene | None:
        try:
            return self.bad_samples.read_or_raise(index, self._read)
        except BadSampleError:
            return None

    def _read(self, index: int) -> Scene:
        pixels = decode_rgb(self._scenes, index)
        mask = self._scenes.read_mask(index, (pixels.shape[0], pixels.shape[1]))
        return Scene(index, torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(mask))
