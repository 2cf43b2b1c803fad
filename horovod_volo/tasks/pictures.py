"""Masks in colours, and pictures of images beside their masks and predictions, for people to look at."""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from horovod_volo.core.batch import IGNORED
from horovod_volo.data.scenes.scene_loader import Scene
from horovod_volo.tasks.task import Picture

_GOLDEN_RATIO = 0.618  # of the circle of hues, between neighbouring classes
_HIGHEST = 256  # pixels


def class_colors() -> NDArray[np.uint8]:
    """Return a colour for each class (256, 3), of which neighbours have different hues; IGNORED is black."""
    hues = np.arange(256) * _GOLDEN_RATIO % 1
    channels = [np.abs((6 * hues + offset) % 6 - 3) - 1 for offset in (0, 4, 2)]
    levels = 55 + 200 * np.clip(np.stack(channels, axis=1), 0, 1)
    levels[IGNORED] = 0
    colors: NDArray[np.uint8] = levels.astype(np.uint8)
    return colors


class ScenePictures:
    """Pictures of the first images of an evaluation."""

    def __init__(self, most: int) -> None:
        """`most` is the number of images; 0 on ranks that write nothing."""
        self._most = most
        self._pictures: dict[str, Picture] = {}

    def add(self, scene: Scene, predicted: Tensor) -> None:
        """Draw an image beside its mask and its predicted classes."""
        name = f"image {scene.number:05}"
        if len(self._pictures) < self._most or name in self._pictures:
            colors = class_colors()
            parts = [scene.pixels.permute(1, 2, 0).numpy()]
            parts += [colors[classes.to(torch.uint8).cpu().numpy()] for classes in (scene.mask, predicted)]
            self._pictures[name] = _encoded(np.concatenate(parts, axis=1))

    def latest(self) -> dict[str, Picture]:
        """Return the pictures by the numbers of their images."""
        return self._pictures


def _encoded(pixels: NDArray[np.uint8]) -> Picture:
    image = Image.fromarray(pixels)
    if image.height > _HIGHEST:
        image = image.resize((image.width * _HIGHEST // image.height, _HIGHEST))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return Picture(file.getvalue(), image.width, image.height)
