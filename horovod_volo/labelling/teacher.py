"""Teachers: trained models that give class logits for each cell of an image, and the images that they label.

The head of the model is applied to each cell of the last feature map as if it were the feature of the
entire image, so that its norms and linear layers are used as they were trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources
from horovod_volo.config.data_settings import Data
from horovod_volo.core.center_crop import resized_to
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import IMAGENET_MEAN, IMAGENET_STD
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalBatches
from horovod_volo.models.build import check_model, spec_of
from horovod_volo.models.pretrained import load_pretrained
from horovod_volo.models.registry import TokenModel, registered_model
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.weights import TIMM
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry


class TeacherChoice(NamedTuple):
    """Which teacher labels images, and in batches of which size."""

    name: str  # a model of timm or of this package, or a run folder
    weights: str = ""  # file of them
    pretrained: bool = False  # timm's weights
    image_side: int = 0  # pixels; 0: the model's own
    batch_size: int = 64


@dataclass(frozen=True)
class Teacher:
    """A trained model that labels cells of images."""

    network: nn.Module
    name: str  # including the image size and a digest of the weights
    image_side: int
    mean: tuple[float, ...]  # of training pixels from 0 to 1
    std: tuple[float, ...]

    def on(self, device: torch.device) -> Teacher:
        """Return the teacher with its model on a device."""
        return replace(self, network=self.network.to(device))

    def label(self, pixels: Tensor) -> Tensor:
        """Return logits (images, classes, rows, columns) of pixels (images, 3, side, side) from 0 to 1."""
        mean, std = (pixels.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        with torch.inference_mode():
            return token_logits(self.network, (pixels - mean) / std)


def load_teacher(choice: TeacherChoice, classes: int) -> Teacher:
    """Build a teacher of `classes` classes with its weights, on the CPU."""
    name, weights, pretrained, image_side, _ = choice
    is_run = Path(name).is_dir()
    if is_run:
        trained = load_pretrained(weights or name, image_side=image_side)
    elif pretrained and registered_model(name) is None:
        trained = load_pretrained(f"{TIMM}{name}", image_side=image_side)
    else:
        check_model(name, img_size=image_side or spec_of(name).img_size, tokens=False)
        if not weights:
            raise UserError(
                f"the teacher {name} has no weights yet. Name a file of them with --teacher-weights; for a "
                "model of timm, --teacher-pretrained takes those in its cache or fetches them."
            )
        trained = load_pretrained(weights, name=name, image_side=image_side)
    if trained.num_classes != classes:
        raise UserError(
            f"the teacher {name} has {trained.num_classes} classes, the images have {classes} class "
            "folders. Both must be the same: give a teacher that was trained on these."
        )
    digest = hashlib.sha256()
    for tensor in trained.network.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    shown = Path(name).resolve().name if is_run else name
    shown = f"{shown} at {trained.image_side} pixels, weights {digest.hexdigest()[:12]}"
    return Teacher(trained.network, shown, trained.image_side, trained.mean, trained.std)


def token_logits(network: nn.Module, images: Tensor) -> Tensor:
    """Return the logits (images, classes, rows, columns) of the cells of a model's feature map."""
    grid: Any = getattr(network, "grid", None)
    if isinstance(network, TokenModel) and grid is not None:
        return _logits_of_token_head(network, network.forward_features(images), grid)  # type: ignore[operator]
    if not all(callable(getattr(network, part, None)) for part in ("forward_features", "forward_head")):
        raise _unsuitable(network, "it has no separate features and head")
    features: Any = network.forward_features(images)  # type: ignore[operator]
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        raise _unsuitable(network, "its features are neither a map nor a sequence of tokens")
    if isinstance(network, VOLO):
        return _logits_of_token_head(network, features, network.pos_embed.shape[1:3])
    return _logits_of_map(network, features) if features.ndim == 4 else _logits_of_tokens(network, features)


def _logits_of_token_head(network: Any, features: Tensor, grid: tuple[int, int]) -> Tensor:
    head = network.head if network.aux_head is None else network.aux_head
    logits: Tensor = head(features[:, 1:])  # (images, rows * columns, classes), the class token left out
    return logits.reshape(len(logits), *grid, -1).permute(0, 3, 1, 2)


def _logits_of_map(network: nn.Module, features: Tensor) -> Tensor:
    if getattr(network, "output_fmt", "NCHW") == "NHWC":
        images, rows, columns, channels = features.shape
        cells = features.reshape(-1, 1, 1, channels)
    else:
        images, channels, rows, columns = features.shape
        cells = features.permute(0, 2, 3, 1).reshape(-1, channels, 1, 1)
    return _head_logits(network, cells).reshape(images, rows, columns, -1).permute(0, 3, 1, 2)


def _logits_of_tokens(network: nn.Module, features: Tensor) -> Tensor:
    prefix = int(getattr(network, "num_prefix_tokens", 0))  # class, distillation and register tokens
    tokens = features[:, prefix:]  # (images, rows * columns, channels)
    images, count, channels = tokens.shape
    side = math.isqrt(count)
    if side * side != count:
        raise _unsuitable(network, f"its {count} tokens are not a square grid")
    # All tokens of a sequence are the cell's, so it does not matter which of them the head uses or averages.
    cells = tokens.reshape(-1, 1, channels).expand(-1, prefix + 1, -1)
    return _head_logits(network, cells).reshape(images, side, side, -1).permute(0, 3, 1, 2)


def _head_logits(network: nn.Module, cells: Tensor) -> Tensor:
    logits: Any = network.forward_head(cells)  # type: ignore[operator]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(cells):
        raise _unsuitable(network, "its head gives no logits for a single cell")
    return logits  # (cells, classes)


def _unsuitable(network: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(network).__name__} cannot label parts of an image: {reason}. Take a convolutional network or "
        "a transformer over one grid of tokens as --teacher."
    )


def denormalize(pixels: Tensor) -> Tensor:
    """Undo the normalisation of the data pipeline; return pixel values from 0 to 1."""
    mean, std = (pixels.new_tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return pixels * std + mean


class TeacherImages:
    """Batches of images of a catalog: whole ones resized to a square, or their centre crops.

    They are read and decoded as evaluation images are; damaged ones are left out. `geometry` is the part of
    each image that is shown; the size before a centre crop is rounded to pixels.
    """

    def __init__(
        self,
        catalog: Catalog,
        image_size: int,
        batch: int,
        resources: RankResources,
        geometry: MapGeometry = WHOLE,
    ) -> None:
        self.problems: list[str] = []  # one message for each image that was left out
        self._image_size, self._geometry = image_size, geometry
        self._images = EvalBatches(
            catalog,
            len(catalog),
            Data(batch_size=batch, bad_samples="skip", bad_samples_limit=len(catalog)),
            image_size=image_size,
            resize=self._resized_shapes,
            rank=0,
            size=1,
            device=resources.device,
            threads=resources.threads,
        )

    def batches(self, indices: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield indices and normalised images (batch, 3, image_size, image_size) of what can be decoded."""
        with closing(self._images.decoded(np.array(indices, dtype=np.int64))) as decoded:
            for pending, images in decoded:
                usable = np.flatnonzero(~pending.bad)
                if len(usable) == len(images):
                    yield pending.indices.tolist(), images
                elif len(usable):
                    yield pending.indices[usable].tolist(), images[torch.from_numpy(usable).to(images.device)]
        self.problems += self._images.bad_samples.new_messages()

    def close(self) -> None:
        """End all threads."""
        self._images.close()

    def _resized_shapes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the heights and widths, (batch, 2), before the centre crop."""
        if self._geometry == WHOLE:
            return np.full_like(sizes, self._image_size)
        resize, crop = self._geometry.resize, self._geometry.size
        return resized_to(sizes, max(1, round(self._image_size * resize / crop)))
