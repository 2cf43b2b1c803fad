"""The batches of images and masks that a rank trains on: how each is scaled, cut, flipped and coloured.

The image is scaled by a random ratio and a square is cut from it, as in mmsegmentation. Where one class fills
most of the square, another one is drawn, at most ten times; so the plan also depends on the mask. Image and
mask are resampled from the stored pixels at once, by the same window.

Invariant: a batch is a pure function of (seed, epoch, step, rank, number of ranks), as for classification;
the plan of an image is one of (seed, epoch, sample) and of its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED, copy_async
from horovod_volo.core.rng import Purpose, uniforms
from horovod_volo.data.prefetcher import PendingBatch
from horovod_volo.data.reading import read_image
from horovod_volo.dense.scene_list import Mask
from horovod_volo.dense.task import DenseBatches

_REDRAWS = 10
_FLIP = 0.5
_DISTORTED = 0.5  # probability of each distortion
_BRIGHTNESS, _HUE_STEPS, _HUE_CIRCLE = 32.0, 18, 180
_FACTORS = (0.5, 1.5)  # of contrast and saturation


@dataclass(frozen=True, eq=False)
class SceneBatch:
    """One micro-batch of images with masks; the tensors are on the rank's device, the indices on the host."""

    images: Tensor  # (batch, 3, side, side) float32, normalised
    masks: Tensor  # (batch, side, side) uint8 classes; IGNORED where there is none
    indices: NDArray[np.int64]  # (batch,) positions in the list
    drawn: NDArray[np.int64]  # likewise, of the images that the epoch's order has here: damaged ones differ


@dataclass(frozen=True, eq=False)
class PendingSceneBatch(PendingBatch):
    """A batch of images with masks that has been read, but whose images are not decoded."""

    masks: NDArray[np.uint8]  # (batch, side, side)
    plans: list[ScenePlan]
    drawn: NDArray[np.int64]  # (batch,) the images that were to be read; damaged ones are replaced


class PreparedScene(NamedTuple):
    """An encoded image, its plan, and the window of its mask."""

    number: int  # in the list
    encoded: NDArray[np.uint8]
    size: tuple[int, int]  # height, width
    plan: ScenePlan
    mask: Mask  # (side, side)


class SceneTrainLoader(DenseBatches[PendingSceneBatch, SceneBatch]):
    """This rank's training batches for segmentation."""

    def _pipeline(self, source: Any, **settings: Any) -> Any:
        return self._decoder.build_scene_pipeline(source, **settings)

    def _read_batch(self, epoch: int, drawn: NDArray[np.int64]) -> PendingSceneBatch:
        # A replacement is augmented as the damaged image would have been.
        prepared = self._readers.map(partial(self._prepare, epoch), drawn.tolist())
        plans = [each.plan for each in prepared]
        begins, ends = zip(*(each.plan.window(each.size) for each in prepared), strict=True)
        inputs: tuple[list[NDArray[Any]], ...] = (
            [each.encoded for each in prepared],
            list(begins),
            list(ends),
            [np.array(plan.shape, dtype=np.float32) for plan in plans],
            [np.array(plan.flip, dtype=np.int32) for plan in plans],
        )
        indices = np.array([each.number for each in prepared], dtype=np.int64)
        masks = np.stack([each.mask for each in prepared])
        return PendingSceneBatch(indices, inputs, masks, plans, drawn)

    def _prepare(self, epoch: int, sample: int) -> PreparedScene:
        """Read an image or its replacement, draw its plan, and cut its mask; a small one is padded."""
        index, (encoded, mask) = self.bad_samples.read_or_replace(sample, self._samples, self._read)
        plan = draw_plan(self._plan_settings, self._side, mask, self._seed, epoch, sample)
        padded = np.full((self._side, self._side), IGNORED, dtype=np.uint8)
        window = plan.cut(mask, like_opencv=self._plan_settings.mask_resize == "opencv")
        padded[: window.shape[0], : window.shape[1]] = window
        return PreparedScene(index, encoded, (mask.shape[0], mask.shape[1]), plan, padded)

    def _read(self, index: int) -> tuple[NDArray[np.uint8], Mask]:
        encoded, size = read_image(self._images, index)
        return encoded, self._images.read_mask(index, size)

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


@dataclass(frozen=True)
class Distortion:
    """Changes of colour, in this order, but contrast either after brightness or last."""

    brightness: float = 0.0  # levels
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0  # of the circle
    contrast_last: bool = False


@dataclass(frozen=True)
class ScenePlan:
    """The window of one image, in the pixels of the scaled image."""

    scaled: tuple[int, int]  # height, width of the whole scaled image
    corner: tuple[int, int]  # top, left of the window
    shape: tuple[int, int]  # its height and width; less than the crop where the image is smaller
    flip: bool
    distortion: Distortion

    def window(self, size: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the window's corners in the pixels of the stored image, given its height and width."""
        factors = np.array(size) / np.array(self.scaled)
        begin = np.array(self.corner) * factors
        end = (np.array(self.corner) + np.array(self.shape)) * factors
        return begin.astype(np.float32), end.astype(np.float32)

    def cut(self, mask: NDArray[np.uint8], *, like_opencv: bool) -> NDArray[np.uint8]:
        """Return the window of a mask, scaled to the nearest pixel, and flipped."""
        rows, columns = (
            _nearest(self.corner[axis], self.shape[axis], mask.shape[axis], self.scaled[axis], like_opencv)
            for axis in (0, 1)
        )
        window = mask[rows[:, None], columns]
        return np.ascontiguousarray(window[:, ::-1]) if self.flip else window


def _nearest(begin: int, length: int, side: int, scaled: int, like_opencv: bool) -> NDArray[np.int64]:
    """Return the stored pixels of scaled ones: those under their centres, or under their first edges."""
    inside = np.arange(begin, begin + length) + (0.0 if like_opencv else 0.5)
    return np.minimum((inside * (side / scaled)).astype(np.int64), side - 1)


def draw_plan(
    settings: Segmentation, crop: int, mask: NDArray[np.uint8], seed: int, epoch: int, sample: int
) -> ScenePlan:
    """Draw the plan of one image."""
    numbers = iter(uniforms(13 + 2 * _REDRAWS, Purpose.SCENE_PLAN, seed, epoch, sample))
    low, high = settings.resize_range
    ratio = low + (high - low) * next(numbers)
    flip = next(numbers) < _FLIP
    distortion = _draw_distortion([next(numbers) for _ in range(9)], on=settings.photometric)
    longer, shorter = (int(side * ratio) for side in settings.scene_size)
    scaled = keep_ratio((mask.shape[0], mask.shape[1]), longer, shorter)
    shape = (min(scaled[0], crop), min(scaled[1], crop))
    for _ in range(_REDRAWS + 1):
        corner = (
            int(next(numbers) * (scaled[0] - shape[0] + 1)),
            int(next(numbers) * (scaled[1] - shape[1] + 1)),
        )
        plan = ScenePlan(scaled, corner, shape, flip, distortion)
        if settings.class_share >= 1 or _is_varied(plan, mask, settings):
            break
    return plan


def keep_ratio(size: tuple[int, int], longer: int, shorter: int) -> tuple[int, int]:
    """Return height and width of an image scaled to fit into a longer and a shorter side."""
    scale = min(longer / max(size), shorter / min(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def _is_varied(plan: ScenePlan, mask: NDArray[np.uint8], settings: Segmentation) -> bool:
    window = plan.cut(mask, like_opencv=settings.mask_resize == "opencv")
    counts = np.bincount(window.ravel(), minlength=IGNORED + 1)[:IGNORED]
    present = counts[counts > 0]
    return len(present) > 1 and bool(present.max() < settings.class_share * present.sum())


def _draw_distortion(numbers: list[float], *, on: bool) -> Distortion:
    if not on:
        return Distortion()
    used = [number < _DISTORTED for number in numbers[:4]]
    low, high = _FACTORS
    first, second, third, fourth = numbers[4:8]
    steps = int(third * 2 * _HUE_STEPS) - _HUE_STEPS  # from -18 to 17
    return Distortion(
        brightness=_BRIGHTNESS * (2 * first - 1) if used[0] else 0.0,
        contrast=low + (high - low) * second if used[1] else 1.0,
        hue=steps / _HUE_CIRCLE if used[2] else 0.0,
        saturation=low + (high - low) * fourth if used[3] else 1.0,
        contrast_last=numbers[8] < _DISTORTED,
    )


def distort(pixels: Tensor, distortion: Distortion) -> Tensor:
    """Return an image (3, height, width) of float levels 0 to 255, distorted.

    After each step levels are clipped and truncated to whole numbers, as in mmsegmentation. Saturation and
    hue are those of HSV with exact colours; OpenCV rounds both, which differs by some levels.
    """
    if distortion.brightness:
        pixels = _levels(pixels + distortion.brightness)
    if not distortion.contrast_last:
        pixels = _contrast(pixels, distortion)
    if distortion.saturation != 1.0:
        pixels = _saturation(pixels, distortion.saturation)
    if distortion.hue:
        pixels = _hue(pixels, distortion.hue)
    return _contrast(pixels, distortion) if distortion.contrast_last else pixels


def _levels(pixels: Tensor) -> Tensor:
    return pixels.clamp_(0, 255).floor_()


def _contrast(pixels: Tensor, distortion: Distortion) -> Tensor:
    return pixels if distortion.contrast == 1.0 else _levels(pixels * distortion.contrast)


def _saturation(pixels: Tensor, factor: float) -> Tensor:
    highest = pixels.amax(dim=0, keepdim=True)
    saturation = 1 - pixels.amin(dim=0, keepdim=True) / highest.clamp_min(1)
    # Of HSV's three values the saturation alone changes: to at most 1.
    factors = torch.minimum(torch.full_like(saturation, factor), 1 / saturation.clamp_min(1e-6))
    return (highest - (highest - pixels) * factors).round_().clamp_(0, 255)


def _hue(pixels: Tensor, shift: float) -> Tensor:
    red, green, blue = pixels
    highest = pixels.amax(dim=0)
    span = highest - pixels.amin(dim=0)
    divisor = span.clamp_min(1e-6)
    # In sixths of the circle: 0 red, 2 green, 4 blue.
    hue = torch.where(
        highest == red,
        (green - blue) / divisor,
        torch.where(highest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    channels = []
    for offset in (5, 3, 1):  # of red, green and blue
        distance = (hue + 6 * shift + offset) % 6
        channels.append(highest - span * torch.minimum(distance, 4 - distance).clamp_(0, 1))
    return torch.stack(channels).round_().clamp_(0, 255)
