"""How far a token's label is from its pixels where label maps are centre crops, by how the maps are read.

The images' sizes are drawn to be like ImageNet's (most of them 4 : 3, about 500 pixels long); they are not
its own. Crops are the training's. Where a label comes from is the weighted mean of the cells that the loss
reads for it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.agreement import WrongResultError
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.objective.roi_weights import roi_weights

SEED = 0
TOKEN_STRIDE = 16  # pixels per token side, of VOLO and LV-ViT
# Aspects, width over height, and the share of images that have them; the rest lie between 1 : 2 and 2 : 1.
ASPECTS = ((4 / 3, 0.70), (3 / 4, 0.14), (1.0, 0.04))
LONGER_SIDE = 500  # pixels, the median


def measure(*, images: int, img_size: int, cells: int, map_geometry: str) -> Result:
    """Measure one training crop of each of so many images."""
    geometry = MapGeometry.parse(map_geometry)
    sizes = drawn_sizes(images)
    tokens = img_size // TOKEN_STRIDE
    plan = draw_crops(SEED, 0, np.arange(images), sizes, Data())
    covered = geometry.covered(sizes)
    crops = plan.fractions(sizes, covered)  # as fractions of what the maps cover
    figures = []
    errors: dict[MapGeometry, NDArray[np.float64]] = {}
    for read_as in dict.fromkeys((WHOLE, geometry)):
        read = _places_read(plan.fractions(sizes, read_as.covered(sizes)), tokens, cells)
        errors[read_as] = np.abs(read - _token_centres(crops, tokens)) / crops[:, 2:, None] * img_size
        distance = np.hypot(errors[read_as][:, 0, :, None], errors[read_as][:, 1, None, :])
        figures += [
            Figure(f"read as {read_as}: mean error", float(distance.mean()), "px"),
            Figure(
                f"read as {read_as}: tokens off by more than one",
                100 * float((distance > TOKEN_STRIDE).mean()),
                "%",
            ),
        ]
    centres = _token_centres(crops, tokens)
    beyond = (centres < 0) | (centres > 1)  # (images, 2, tokens)
    outside = beyond[:, 0, :, None] | beyond[:, 1, None, :]
    figures.append(Figure("tokens beyond the map, which read its edge", 100 * float(outside.mean()), "%"))
    # Between the map's edge and the middle of its outermost cell there is nothing to interpolate with.
    half_cell = 0.5 / cells / crops[:, 2:, None] * img_size
    if (errors[geometry] - half_cell)[~beyond].max() > TOKEN_STRIDE:
        raise WrongResultError(f"A token on a map of {geometry} reads more than one token beside its pixels.")
    return Result(
        "map_geometry",
        f"labels beside their pixels at {img_size} px, maps of {geometry}, {images:,} drawn image sizes",
        figures,
    )


def drawn_sizes(images: int) -> NDArray[np.int64]:
    """Draw heights and widths, (images, 2)."""
    source = np.random.default_rng(SEED)
    rest = 1 - sum(share for _, share in ASPECTS)
    kind = source.choice(len(ASPECTS) + 1, images, p=[*(share for _, share in ASPECTS), rest])
    others = np.exp(source.uniform(-np.log(2), np.log(2), images))
    aspects = np.where(
        kind == len(ASPECTS), others, np.array([*(aspect for aspect, _ in ASPECTS), 1.0])[kind]
    )
    longer = LONGER_SIDE * np.exp(source.normal(0, 0.2, images))
    sides = np.stack([longer / aspects.clip(1), longer * aspects.clip(None, 1)], axis=1)
    return sides.round().astype(np.int64)


def _places_read(boxes: NDArray[np.float32], tokens: int, cells: int) -> NDArray[np.float64]:
    """Return where each row and column of tokens reads its map, (images, 2, tokens), as fractions of it."""
    reach = max(1.0, float(boxes[:, 2:].max()))
    places = []
    for axis in (0, 1):
        starts, extents = (torch.from_numpy(boxes[:, place].copy()) for place in (axis, axis + 2))
        windows = roi_weights(starts, extents, side=tokens, size=cells, scale=cells, reach=reach)
        places.append(((windows.cells + 0.5) / cells * windows.weights).sum(dim=2).numpy())
    return np.stack(places, axis=1).astype(np.float64)


def _token_centres(boxes: NDArray[np.float32], tokens: int) -> NDArray[np.float64]:
    """Return where the middles of rows and columns of tokens are, (images, 2, tokens)."""
    steps = (np.arange(tokens) + 0.5) / tokens
    centres: NDArray[np.float64] = boxes[:, :2, None] + boxes[:, 2:, None] * steps
    return centres
