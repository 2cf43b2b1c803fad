"""Distance between a token and the place its label is read from, where label maps are centre crops.

The image sizes are drawn from a distribution like ImageNet's (mostly 4 : 3, about 500 pixels long), crops as
in training. A label's place is the weighted mean of the map cells that the loss reads for it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import Flag, ImgSize
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.objective.roi_weights import roi_weights

_TOKEN_SIDE = 16  # pixels of VOLO and LV-ViT
_SEED = 0
# Aspect ratios (width : height) and the fraction of images that have them; others are from 1 : 2 to 2 : 1.
_ASPECTS = ((4 / 3, 0.70), (3 / 4, 0.14), (1.0, 0.04))
_LONGER_SIDE = 500  # pixels, the median


def measure(
    *,
    images: Annotated[int, Flag("images whose sizes are drawn")] = 1000,
    img_size: ImgSize = 224,
    cells: Annotated[int, Flag("cells per side of a label map")] = 18,
    map_geometry: Annotated[
        str, Flag("part of the image that maps cover", metavar="GEOMETRY")
    ] = "centre-crop:576:576",
) -> Result:
    """Measure one training crop of each image."""
    geometry = MapGeometry.parse(map_geometry)
    sizes, tokens = _draw_sizes(images), img_size // _TOKEN_SIDE
    plan = draw_crops(_SEED, 0, np.arange(images), sizes, Data())
    crops = plan.fractions(sizes, geometry.covered(sizes))  # as fractions of what the maps cover
    centres = _token_centres(crops, tokens)
    figures = []
    errors: dict[MapGeometry, NDArray[np.float64]] = {}
    for read_as in dict.fromkeys((WHOLE, geometry)):
        read = _places_read(plan.fractions(sizes, read_as.covered(sizes)), tokens, cells)
        errors[read_as] = np.abs(read - centres) / crops[:, 2:, None] * img_size
        distance = np.hypot(errors[read_as][:, 0, :, None], errors[read_as][:, 1, None, :])
        far = 100 * float((distance > _TOKEN_SIDE).mean())
        figures += [
            Figure(f"read as {read_as}: mean error", float(distance.mean()), "px"),
            Figure(f"read as {read_as}: tokens off by more than one", far, "%"),
        ]
    beyond = (centres < 0) | (centres > 1)  # (images, 2, tokens)
    outside = 100 * float((beyond[:, 0, :, None] | beyond[:, 1, None, :]).mean())
    figures.append(Figure("tokens beyond the map, which read its edge", outside, "%"))
    # Between the edge of a map and the middle of its outermost cell there is nothing to interpolate with.
    half_cell = 0.5 / cells / crops[:, 2:, None] * img_size
    if (errors[geometry] - half_cell)[~beyond].max() > _TOKEN_SIDE:
        raise WrongResultError(f"A token on a map of {geometry} reads more than one token beside its pixels.")
    title = f"labels beside their pixels at {img_size} px, maps of {geometry}, {images:,} drawn image sizes"
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


def _places_read(boxes: NDArray[np.float32], tokens: int, cells: int) -> NDArray[np.float64]:
    """Return where rows and columns of tokens read their map, (images, 2, tokens), as fractions of it."""
    reach = max(1.0, float(boxes[:, 2:].max()))
    places = []
    for axis in (0, 1):
        starts, extents = (torch.from_numpy(boxes[:, place].copy()) for place in (axis, axis + 2))
        windows = roi_weights(starts, extents, side=tokens, size=cells, scale=cells, reach=reach)
        places.append(((windows.cells + 0.5) / cells * windows.weights).sum(dim=2).numpy())
    return np.stack(places, axis=1).astype(np.float64)


def _token_centres(boxes: NDArray[np.float32], tokens: int) -> NDArray[np.float64]:
    """Return the centres of rows and columns of tokens, (images, 2, tokens)."""
    steps = (np.arange(tokens) + 0.5) / tokens
    centres: NDArray[np.float64] = boxes[:, :2, None] + boxes[:, 2:, None] * steps
    return centres
