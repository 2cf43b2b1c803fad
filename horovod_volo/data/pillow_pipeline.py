"""What the DALI pipelines do, by Pillow on the CPU, for machines where DALI is not installed.

Invariant: inputs are those of `image_decoder.py`, and pixels are DALI's up to rounding. A batch depends on
its inputs alone. Batches are returned in the order in which they were read, some of them decoded ahead.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from horovod_volo.data import image_decoder
from horovod_volo.data.reading import UNDECODABLE, decoded_rgb

name = "pillow"
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
Batch = Tensor | list[Tensor]  # a list where the images differ in size


class PillowPipeline:
    """Decodes batches in threads; it is called as a DALI pipeline is. The threads end with it."""

    def __init__(
        self,
        source: image_decoder.Source,
        decode: Callable[..., Tensor],
        collect: Callable[[list[Tensor]], Batch],
        threads: int,
    ) -> None:
        """`decode` is given the inputs of one image; `collect` makes a batch of what it returns."""
        self._source, self._decode, self._collect = source, decode, collect
        self._pool = ThreadPoolExecutor(threads, "image-decoder")
        weakref.finalize(self, self._pool.shutdown, cancel_futures=True)
        self._decoding: deque[list[Future[Tensor]]] = deque()
        self._ended = False

    def run(self, stream: Any = None) -> tuple[Batch]:  # noqa: ARG002
        """Return the next batch; raise StopIteration after the last, RuntimeError if it is undecodable."""
        while not self._ended and len(self._decoding) <= image_decoder.BATCHES_DECODED_AHEAD:
            try:
                inputs = self._source()
            except StopIteration:
                self._ended = True
            else:
                images = [
                    self._pool.submit(self._decode, *of_image) for of_image in zip(*inputs, strict=True)
                ]
                self._decoding.append(images)
        if not self._decoding:
            raise StopIteration
        try:
            images_of_batch = [image.result() for image in self._decoding.popleft()]
        except UNDECODABLE as error:
            raise RuntimeError(f"Pillow cannot decode an image: {error}") from error
        return (self._collect(images_of_batch),)

    def reset(self) -> None:
        """Read from the source again, after StopIteration."""
        self._ended = False


# These have the arguments of image_decoder.py, of which DALI alone needs some.
def build_train_pipeline(
    source: image_decoder.Source, *, device: torch.device, threads: int, resize: bool, **_: Any
) -> PillowPipeline:
    """Build the pipeline that decodes and crops training images."""
    if resize:
        raise NotImplementedError("crops that Pillow has decoded are resized by torch")
    return PillowPipeline(source, _crop, partial(_on_device, device), threads)


def build_scene_pipeline(
    source: image_decoder.Source, *, device: torch.device, threads: int, **_: Any
) -> PillowPipeline:
    """Build the pipeline that decodes images and resamples a window of each."""
    return PillowPipeline(source, _window, partial(_on_device, device), threads)


def build_eval_pipeline(
    source: image_decoder.Source,
    *,
    image_size: int,
    device: torch.device,
    threads: int,
    normalization: image_decoder.Normalization,
    interpolation: str,
    **_: Any,
) -> PillowPipeline:
    mean, std = normalization.levels(device)

    def decode(encoded: NDArray[np.uint8], size: NDArray[Any], corner: NDArray[Any]) -> Tensor:
        image = cropped(decoded_rgb(encoded.data), size, corner, image_size, interpolation)
        return torch.from_numpy(image).permute(2, 0, 1)

    def collect(images: list[Tensor]) -> Tensor:
        return torch.stack(images).to(device).float().sub_(mean).div_(std)

    return PillowPipeline(source, decode, collect, threads)


def undecodable(images: image_decoder.Input) -> list[int]:
    """Return the positions of the encoded images that Pillow cannot decode."""
    positions = []
    for position, image in enumerate(images):
        try:
            decoded_rgb(image.data)
        except UNDECODABLE:
            positions.append(position)
    return positions


def cropped(
    image: Image.Image, size: NDArray[Any], corner: NDArray[Any], side: int, interpolation: str
) -> NDArray[np.uint8]:
    """Resize an image to (height, width) and cut out a crop (side, side, 3); black outside the image."""
    (height, width), (top, left) = size.astype(int).tolist(), corner.tolist()
    resized = image.resize((width, height), _FILTERS[interpolation])
    return np.array(resized.crop((left, top, left + side, top + side)))


def _crop(encoded: NDArray[np.uint8], corner: NDArray[Any], shape: NDArray[Any]) -> Tensor:
    (top, left), (height, width) = corner.tolist(), shape.tolist()
    return torch.from_numpy(np.array(decoded_rgb(encoded.data).crop((left, top, left + width, top + height))))


def _window(
    encoded: NDArray[np.uint8],
    begin: NDArray[np.float32],
    end: NDArray[np.float32],
    size: NDArray[np.float32],
    flip: NDArray[np.int32],
) -> Tensor:
    """Resample a window linearly, without antialiasing; beyond the border the image's last pixels go on."""
    pixels = np.asarray(decoded_rgb(encoded.data))
    for axis in (0, 1):
        length, last = int(size[axis]), pixels.shape[axis] - 1
        centers = begin[axis] + (np.arange(length) + 0.5) * (end[axis] - begin[axis]) / length - 0.5
        centers = centers.clip(0, last).astype(np.float32)
        before = centers.astype(np.int64)
        weights = (centers - before).reshape(-1, *[1] * (2 - axis))
        first, second = (np.take(pixels, rows, axis) for rows in (before, (before + 1).clip(max=last)))
        pixels = first + (second.astype(np.float32) - first) * weights
    window = torch.from_numpy(np.rint(pixels).astype(np.uint8))
    return window.flip(1) if flip else window


def _on_device(device: torch.device, images: list[Tensor]) -> list[Tensor]:
    return [image.to(device) for image in images]


image_decoder.DECODERS.register("pillow", sys.modules[__name__])
