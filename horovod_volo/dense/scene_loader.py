"""The batches of images and masks that a rank trains on: how each is scaled, cut, flipped and coloured.

The image is scaled by a random ratio and a square is cut from it, as in mmsegmentation. Where one class fills
most of the square, another one is drawn, at most ten times; so the plan also depends on the mask. Image and
mask are resampled from the stored pixels at once, by the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.core.rng import Purpose, uniforms
from horovod_volo.data.image_decoder import Input
from horovod_volo.data.reading import read_image
from horovod_volo.dense.dense_batches import DenseBatches, PendingDenseBatch
from horovod_volo.dense.scene_list import Mask

_REDRAWS = 10
_FLIP = 0.5
_DISTORTED = 0.5  # probability of each distortion
_BRIGHTNESS, _HUE_STEPS, _HUE_CIRCLE = 32.0, 18, 180
_FACTORS = (0.5, 1.5)  # of contrast and saturation


class SceneTrainLoader(DenseBatches):
    """This rank's training batches for segmentation; targets are masks (batch, side, side) uint8."""

    def _pipeline(self, source: Any, **settings: Any) -> Any:
        return self._decoder.build_scene_pipeline(source, **settings)

    def _prepare(self, epoch: int, sample: int) -> tuple[int, NDArray[np.uint8], "ScenePlan", Mask]:
        index, (encoded, mask) = self.bad_samples.read_or_replace(sample, self._samples, self._read)
        plan = draw_plan(self._config.segmentation, self._side, mask, self._seed, epoch, sample)
        padded = np.full((self._side, self._side), IGNORED, dtype=np.uint8)
        window = plan.cut(mask)
        padded[: window.shape[0], : window.shape[1]] = window
        return index, encoded, plan, padded

    def _inputs(self, plans: Sequence["ScenePlan"]) -> tuple[Input, ...]:
        begins, ends = zip(*(plan.window() for plan in plans), strict=True)
        shapes = [np.array(plan.shape, dtype=np.float32) for plan in plans]
        return list(begins), list(ends), shapes, [np.array(plan.flip, dtype=np.int32) for plan in plans]

    def _collate(self, targets: Sequence[Mask]) -> tuple[NDArray[np.uint8]]:
        return (np.stack(targets),)

    def _read(self, index: int) -> tuple[NDArray[np.uint8], Mask]:
        encoded, size = read_image(self._images, index)
        return encoded, self._images.read_mask(index, size)

    def _transform(self, pending: PendingDenseBatch, decoded: Any) -> Tensor:
        images = torch.zeros(len(decoded), 3, self._side, self._side, device=self._device)
        # Perhaps views of DALI's memory, valid until its next run.
        windows = [torch.utils.dlpack.from_dlpack(decoded[number]) for number in range(len(decoded))]

        def transform(number: int) -> None:
            pixels = windows[number].permute(2, 0, 1).float()
            levels = distort(pixels, pending.plans[number].distortion)
            height, width = levels.shape[1:]
            torch.sub(levels, self._mean, out=images[number, :, :height, :width]).div_(self._std)

        if images.device.type == "cpu":
            self._transform_threads.map(transform, range(len(windows)))
        else:
            for number in range(len(windows)):
                transform(number)
        return images


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

    size: tuple[int, int]  # height, width of the stored image
    scaled: tuple[int, int]  # height, width of the whole scaled image
    corner: tuple[int, int]  # top, left of the window
    shape: tuple[int, int]  # its height and width; less than the crop where the image is smaller
    flip: bool
    distortion: Distortion

    def window(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the window's corners in the pixels of the stored image."""
        factors = np.array(self.size) / np.array(self.scaled)
        begin = np.array(self.corner) * factors
        end = (np.array(self.corner) + np.array(self.shape)) * factors
        return begin.astype(np.float32), end.astype(np.float32)

    def cut(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the window of a mask, flipped: each pixel is the stored one under its centre."""
        stored = list[NDArray[np.int64]]()  # rows, then columns
        for begin, length, side, scaled in zip(self.corner, self.shape, mask.shape, self.scaled, strict=True):
            centres = (np.arange(begin, begin + length) + 0.5) * (side / scaled)
            stored.append(np.minimum(centres.astype(np.int64), side - 1))
        window = mask[np.ix_(*stored)]
        return np.ascontiguousarray(window[:, ::-1]) if self.flip else window


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
    size = mask.shape[0], mask.shape[1]
    scaled = keep_ratio(size, longer, shorter)
    shape = (min(scaled[0], crop), min(scaled[1], crop))
    tops, lefts = scaled[0] - shape[0] + 1, scaled[1] - shape[1] + 1
    for _ in range(_REDRAWS + 1):
        corner = int(next(numbers) * tops), int(next(numbers) * lefts)
        plan = ScenePlan(size, scaled, corner, shape, flip, distortion)
        if settings.class_share >= 1 or _is_varied(plan.cut(mask), settings.class_share):
            break
    return plan


def keep_ratio(size: tuple[int, int], longer: int, shorter: int) -> tuple[int, int]:
    """Return height and width of an image scaled to fit into a longer and a shorter side."""
    scale = min(longer / max(size), shorter / min(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def _is_varied(window: NDArray[np.uint8], class_share: float) -> bool:
    counts = np.bincount(window.ravel(), minlength=IGNORED + 1)[:IGNORED]
    present = counts[counts > 0]
    return len(present) > 1 and bool(present.max() < class_share * present.sum())


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
    of_others = torch.where(highest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = torch.where(highest == red, (green - blue) / divisor, of_others)
    channels = []
    for offset in (5, 3, 1):  # of red, green and blue
        distance = (hue + 6 * shift + offset) % 6
        channels.append(highest - span * torch.minimum(distance, 4 - distance).clamp_(0, 1))
    return torch.stack(channels).round_().clamp_(0, 255)
