"""Distance between a token and the place its label is read from, where label maps are centre crops.

The image sizes are drawn from a distribution like ImageNet's (mostly 4 : 3, about 500 pixels long), crops as
in training. A label's place is the weighted mean of the map cells that the loss reads for it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import MAP_SIDE
from horovod_volo.config.data_settings import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.objective.roi_weights import roi_weights

_IMG_SIZE, _TOKENS, _TOKEN_SIDE = (
    224,
    14,
    16,
)  # of VOLO and LV-ViT: pixels, tokens per side, pixels of a token
_SEED = 0
# Aspect ratios (width : height) and the fraction of images that have them; others are from 1 : 2 to 2 : 1.
_ASPECTS = ((4 / 3, 0.70), (3 / 4, 0.14), (1.0, 0.04))
_LONGER_SIDE = 500  # pixels, the median


def measure(
    *,
    images: Annotated[int, Flag("images whose sizes are drawn")] = 1000,
    map_geometry: Annotated[str, Flag("part of the image that maps cover")] = "centre-crop:576:576",
) -> Result:
    """Measure one training crop of each image."""
    geometry = MapGeometry.parse(map_geometry)
    sizes = _draw_sizes(images)
    drawn = draw_crops(_SEED, 0, np.arange(images), sizes, Data())
    crops = drawn.fractions(sizes, geometry.covered(sizes))  # as fractions of what the maps cover
    # The centres of rows and columns of tokens, (images, 2, tokens).
    centres = crops[:, :2, None] + crops[:, 2:, None] * (np.arange(_TOKENS) + 0.5) / _TOKENS
    figures = []
    for read_as in dict.fromkeys((WHOLE, geometry)):
        read = _places_read(drawn.fractions(sizes, read_as.covered(sizes)))
        errors = np.abs(read - centres) / crops[:, 2:, None] * _IMG_SIZE
        distance = np.hypot(errors[:, 0, :, None], errors[:, 1, None, :])
        far = 100 * float((distance > _TOKEN_SIDE).mean())
        figures += [
            Figure(f"read as {read_as}: mean error", float(distance.mean()), "px"),
            Figure(f"read as {read_as}: tokens off by more than one", far, "%"),
        ]
    beyond = (centres < 0) | (centres > 1)  # (images, 2, tokens)
    outside = 100 * float((beyond[:, 0, :, None] | beyond[:, 1, None, :]).mean())
    figures.append(Figure("tokens beyond the map, which read its edge", outside, "%"))
    # Between the edge of a map and the middle of its outermost cell there is nothing to interpolate with.
    half_cell = 0.5 / MAP_SIDE / crops[:, 2:, None] * _IMG_SIZE
    if (errors - half_cell)[~beyond].max() > _TOKEN_SIDE:  # of the last, which is the right geometry
        raise WrongResultError(f"A token on a map of {geometry} reads more than one token beside its pixels.")
    title = f"labels beside their pixels at {_IMG_SIZE} px, maps of {geometry}, {images:,} drawn image sizes"
    return Result("map_geometry", title, figures)


def _draw_sizes(images: int) -> NDArray[np.int64]:
    """Draw heights and widths, (images, 2)."""
    source = np.random.default_rng(_SEED)
    known, fractions = zip(*_ASPECTS, strict=True)
    kind = source.choice(len(known) + 1, images, p=[*fractions, 1 - sum(fractions)])
    others = np.exp(source.uniform(-np.log(2), np.log(2), images))
    aspects = np.where(kind == len(known), others, np.array([*known, 1.0])[kind])
    longer = _LONGER_SIDE * np.exp(source.normal(0, 0.2, images))
    sides = np.stack([longer / aspects.clip(1), longer * aspects.clip(None, 1)], axis=1)
    return sides.round().astype(np.int64)


def _places_read(boxes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return where rows and columns of tokens read their map, (images, 2, tokens), as fractions of it."""
    reach = max(1.0, float(boxes[:, 2:].max()))
    places = []
    for axis in (0, 1):
        starts, extents = (torch.from_numpy(boxes[:, place].copy()) for place in (axis, axis + 2))
        windows = roi_weights(starts, extents, side=_TOKENS, size=MAP_SIDE, scale=MAP_SIDE, reach=reach)
        places.append(((windows.cells + 0.5) / MAP_SIDE * windows.weights).sum(dim=2).numpy())
    return np.stack(places, axis=1).astype(np.float64)
