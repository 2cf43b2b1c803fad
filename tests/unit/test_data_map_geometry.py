"""A token's label belongs to the position of its pixels, whatever part of the image a label map covers.

Colours encode the position of a pixel in the stored image, and the logits of a cell the position of its
centre: class 0 the row, class 1 the column. TrainLoader augments both, and the logits of each token are
recovered from the targets that the loss computes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from coded_images import PLAIN, only_batch, position_coded, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.data import loader as loader_module
from horovod_volo.data.augmentation import crop_flip
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.objective.label_map import map_targets
from horovod_volo.token_labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.token_labels.source import open_labels

SEED = 5
SIDE, TOKENS = 96, 6  # of 16 pixels
SIZES = [(160, 100), (97, 151), (64, 64), (210, 75), (60, 180)]  # width, height
IMAGES = 40
GEOMETRIES = (WHOLE, PUBLISHED, MapGeometry(256, 224), MapGeometry(224, 256))
OFFSET = 2.0  # added to each logit, so that position 0 differs from an absent class

Places = NDArray[np.float64]  # (2, TOKENS, TOKENS): rows, columns, as fractions of the stored image


class TokenPlaces(NamedTuple):
    """Positions of the tokens of one image, by its pixels and by its labels."""

    shown: Places  # by the pixels' colours
    reported: Places  # by the labels
    blank: NDArray[np.bool_]  # (TOKENS, TOKENS) whether some of the token's pixels are filled
    covered: NDArray[np.float64]  # top, left, height, width of the map
    token: NDArray[np.float64]  # (2, 1, 1) the height and width of a token


def coded_set(folder: Path, geometry: MapGeometry, cells: int) -> tuple[Path, Path]:
    """Write images, and for each a map that covers the part given by the geometry."""
    images = {f"train/a/{n:02d}.png": position_coded(*SIZES[n % len(SIZES)]) for n in range(IMAGES)}
    (folder / "maps" / "a").mkdir(parents=True)
    steps = (np.arange(cells) + 0.5) / cells
    for number in range(IMAGES):
        width, height = SIZES[number % len(SIZES)]
        ((top, left, tall, wide),) = geometry.covered(np.array([[height, width]]))
        places = np.stack(np.meshgrid(top + tall * steps, left + wide * steps, indexing="ij"))
        ids = np.stack([np.zeros((cells, cells)), np.ones((cells, cells))])
        stored = torch.from_numpy(np.stack([places + OFFSET, ids])).half()
        torch.save(stored, folder / "maps" / "a" / f"{number:02d}.pt")
    return write_images(folder / "images", images), folder / "maps"


def one_batch(images: Path, maps: Path, geometry: MapGeometry, **settings: Any) -> list[TokenPlaces]:
    """Return the tokens of an epoch with a single batch, its maps read with this geometry."""
    catalog = build_catalog(str(images), "train", None)
    catalog.classes = ("a", "b", "c")
    drawn = Data(batch_size=IMAGES, **(PLAIN | settings))
    batch = only_batch(catalog, open_labels(str(maps), catalog, None, geometry), drawn, side=SIDE, seed=SEED)
    read = batch.labels.maps
    how: dict[str, Any] = {"sides": (TOKENS,), "num_classes": 3, "geometry": "corrected"}
    (target,) = map_targets(read.scores, read.ids, read.boxes, reach=read.reach, **how)
    # The ratio of a class's probability to that of a class without a logit is exp(logit).
    weights = [torch.where(target.ids == number, target.weights, 0).sum(dim=1) for number in (0, 1)]
    logits = (torch.stack(weights) / target.uniform + 1).log()
    reported = logits.numpy().astype(np.float64).reshape(2, IMAGES, TOKENS, TOKENS).swapaxes(0, 1) - OFFSET
    colours = unnormalised(batch.images)
    filled = (np.abs(colours - np.array(FILL)[:, None, None]).max(axis=1) < 1).astype(np.float32)
    # Next to filled pixels, later operations blend the fill colour into the colours that encode positions.
    filled = torch.nn.functional.max_pool2d(torch.from_numpy(filled), 5, 1, padding=2).numpy()
    shown = _tokens(colours[:, 1::-1] / 255).mean(axis=(3, 5))  # (images, 2, TOKENS, TOKENS)
    blank = _tokens(filled[:, None]).max(axis=(3, 5))[:, 0] > 0
    extents = [_extents(catalog.location(n), geometry, n, drawn) for n in batch.indices.tolist()]
    places = zip(shown, reported, blank, extents, strict=True)
    return [TokenPlaces(*of_image, *extent) for *of_image, extent in places]


def _tokens(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cut (images, n, SIDE, SIDE) into tokens, (images, n, TOKENS, pixels, TOKENS, pixels)."""
    pixels = SIDE // TOKENS
    return values.reshape(*values.shape[:2], TOKENS, pixels, TOKENS, pixels)


def _extents(path: str, geometry: MapGeometry, index: int, drawn: Data) -> tuple[Places, Places]:
    """Return the part of the image that the map covers, and the height and width of a token of its crop."""
    with Image.open(path) as image:
        size = np.array([[image.height, image.width]])
    crop_flip = draw_crops(SEED, 0, np.array([index]), size, drawn)
    return geometry.covered(size)[0], (crop_flip.boxes[0, 2:] / size[0] / TOKENS)[:, None, None]


def errors(tokens: TokenPlaces, cells: int) -> NDArray[np.float64]:
    """Return the distance of each token's label from its pixels' position, (TOKENS, TOKENS), in tokens.

    Beyond the map the nearest cell is used, whose centre is half a cell inside the map.
    """
    half_cell = tokens.covered[2:, None, None] / cells / 2
    first = tokens.covered[:2, None, None] + half_cell
    last = first + tokens.covered[2:, None, None] - 2 * half_cell
    return (np.abs(tokens.reported - tokens.shown.clip(first, last)) / tokens.token).max(axis=0)


def is_beyond(tokens: TokenPlaces) -> NDArray[np.bool_]:
    """Return a mask of the tokens, (TOKENS, TOKENS), outside the part that the map covers."""
    low, extent = tokens.covered[:2, None, None], tokens.covered[2:, None, None]
    return ((tokens.shown < low) | (tokens.shown > low + extent)).any(axis=0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cells", [9, 14, 18])
def test_labels_belong_to_the_positions_of_the_pixels(tmp_path, geometry, cells):
    folders = coded_set(tmp_path, geometry, cells)
    batch = one_batch(*folders, geometry, hflip=0.5, vflip=0.5)
    right = np.stack([errors(tokens, cells) for tokens in batch])
    # The resolution of the colours gives an error of a few hundredths of a token. On the edge of the map the
    # error is larger, but less than half a token.
    assert right.mean() < 0.06
    assert right.max() < 0.5
    wrong = np.stack([errors(tokens, cells) for tokens in one_batch(*folders, WHOLE, hflip=0.5, vflip=0.5)])
    if geometry == WHOLE:
        assert np.array_equal(wrong, right)
        return
    # The measure must detect maps that are read as if they covered whole images.
    assert wrong.mean() > 0.5
    assert (wrong > 1).mean() > 0.15
    # With the smaller maps many tokens are outside the covered part; with borders, those of long images.
    assert np.mean([is_beyond(tokens).mean() for tokens in batch]) > 0.04


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_labels_move_with_rotated_sheared_and_translated_images(
    tmp_path: Path, geometry: MapGeometry, randaugment_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with three layers of geometric operations and without colour operations."""

    def geometric_only(*arguments: Any) -> Operations:
        drawn = draw_operations(*arguments)
        return replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))

    monkeypatch.setattr(loader_module, "draw_operations", geometric_only)
    folders = coded_set(tmp_path, geometry, 18)
    settings = {"aa": "rand-m9-n3-p1-mstd0.5-inc1", "hflip": 0.5, "vflip": 0.5}
    settings["randaugment_on"] = randaugment_on

    def found(read_as: MapGeometry) -> NDArray[np.float64]:
        batch = one_batch(*folders, read_as, **settings)
        return np.concatenate([errors(tokens, 18)[~tokens.blank] for tokens in batch])

    # Maps move by whole cells, and cells next to filled pixels may have no label.
    right = found(geometry)
    assert len(right) > IMAGES * TOKENS**2 / 2
    assert right.mean() < 0.2
    assert (right > 1).mean() < 0.02
    if geometry != WHOLE:
        assert (found(WHOLE) > 1).mean() > 0.15
    if geometry == PUBLISHED:  # the measure must detect maps that are not widened
        unwidened = np.array([[0, 0, 1, 1]], np.float32)
        monkeypatch.setattr(crop_flip, "covered_after_warp", lambda boxes, _: unwidened.repeat(len(boxes), 0))
        # If the whole image is rotated, less of a crop comes from outside the map.
        assert (found(geometry) > 1).mean() > (0.08 if randaugment_on == "crop" else 0.05)
