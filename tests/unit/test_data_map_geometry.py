"""A token's label is that of its pixels' place, whatever part of its image a label map covers.

Pictures and maps are coded: colours tell where in the stored image a pixel lies, and the logits of a cell
tell where its centre lies, with class 0 the row and class 1 the column. Both go through the training stream
and the loss's own reading of maps, from which a token's logits are taken back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from coded_images import PLAIN, only_batch, place_coded, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.schema import Data
from horovod_volo.data import loader as stream_module
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.rand_augment import Operations, draw_operations
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.data.labels.source import open_labels
from horovod_volo.objective.label_map import map_target
from horovod_volo.objective.soft_target import SoftTarget

SEED = 5
SIDE, TOKENS = 96, 6  # of 16 pixels
SIZES = [(160, 100), (97, 151), (64, 64), (210, 75), (60, 180)]  # width, height
IMAGES = 40
GEOMETRIES = (WHOLE, PUBLISHED, MapGeometry(256, 224), MapGeometry(224, 256))
UNWIDENED = np.array([0, 0, 1, 1], np.float32)
OFFSET = 2.0  # a logit beside it, so that a place at 0 differs from an absent class

Places = NDArray[np.float64]  # (2, TOKENS, TOKENS): rows, columns, as fractions of the stored image


class Seen(NamedTuple):
    """What one image of a batch shows and is labelled as, token by token."""

    shown: Places  # by the pixels' colours
    reported: Places  # by the labels
    blank: NDArray[np.bool_]  # (TOKENS, TOKENS) whether some of the token's pixels are filled
    covered: NDArray[np.float64]  # top, left, height, width of the map
    token: NDArray[np.float64]  # (2, 1, 1) the height and width of a token


def coded_set(folder: Path, geometry: MapGeometry, cells: int) -> tuple[Path, Path]:
    """Write images, and a map of each that covers what the geometry says."""
    images = {f"train/a/{n:02d}.png": place_coded(*SIZES[n % len(SIZES)]) for n in range(IMAGES)}
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


def one_batch(images: Path, maps: Path, geometry: MapGeometry, **settings: Any) -> list[Seen]:
    """Return what the only batch of an epoch shows, its maps read with this geometry."""
    catalog = build_catalog(str(images), "train", None)
    catalog.classes = ("a", "b", "c")
    drawn = Data(batch_size=IMAGES, **(PLAIN | settings))
    batch = only_batch(catalog, open_labels(str(maps), catalog, None, geometry), drawn, side=SIDE, seed=SEED)
    target = map_target(
        batch.labels.maps.scores,
        batch.labels.maps.ids,
        batch.labels.maps.boxes,
        side=TOKENS,
        num_classes=3,
        geometry="corrected",
        reach=batch.labels.maps.reach,
    )
    # Probability over that of a class without a logit: e to the logit.
    logits = torch.stack([_weight_of(target, number) / target.uniform + 1 for number in (0, 1)]).log()
    reported = logits.numpy().astype(np.float64).reshape(2, IMAGES, TOKENS, TOKENS).swapaxes(0, 1) - OFFSET
    colours = unnormalised(batch.images)
    filled = (np.abs(colours - np.array(FILL)[:, None, None]).max(axis=1) < 1).astype(np.float32)
    # Next to what is filled, later operations mix its colour into the colours that tell places.
    filled = torch.nn.functional.max_pool2d(torch.from_numpy(filled), 5, 1, padding=2).numpy()
    shown = _tokens(colours[:, 1::-1] / 255).mean(axis=(3, 5))  # (images, 2, TOKENS, TOKENS)
    blank = _tokens(filled[:, None]).max(axis=(3, 5))[:, 0] > 0
    return [
        Seen(shown[n], reported[n], blank[n], *_extents(catalog.location(index), geometry, int(index), drawn))
        for n, index in enumerate(batch.indices)
    ]


def _weight_of(target: SoftTarget, number: int) -> torch.Tensor:
    return torch.where(target.ids == number, target.weights, 0).sum(dim=1)


def _tokens(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cut (images, n, SIDE, SIDE) into tokens, (images, n, TOKENS, pixels, TOKENS, pixels)."""
    pixels = SIDE // TOKENS
    return values.reshape(*values.shape[:2], TOKENS, pixels, TOKENS, pixels)


def _extents(path: str, geometry: MapGeometry, index: int, drawn: Data) -> tuple[Places, Places]:
    """Return what the map covers of an image, and the height and width of a token of its crop."""
    with Image.open(path) as image:
        size = np.array([[image.height, image.width]])
    plan = draw_crops(SEED, 0, np.array([index]), size, drawn)
    return geometry.covered(size)[0], (plan.boxes[0, 2:] / size[0] / TOKENS)[:, None, None]


def errors(seen: Seen, cells: int) -> NDArray[np.float64]:
    """Return how far each token's label is from its pixels' place, (TOKENS, TOKENS), in tokens.

    Beyond the map the nearest cell counts, of which the outermost has its centre half a cell inside.
    """
    half_cell = seen.covered[2:, None, None] / cells / 2
    first = seen.covered[:2, None, None] + half_cell
    last = first + seen.covered[2:, None, None] - 2 * half_cell
    return (np.abs(seen.reported - seen.shown.clip(first, last)) / seen.token).max(axis=0)


def is_beyond(seen: Seen) -> NDArray[np.bool_]:
    """Say which tokens, (TOKENS, TOKENS), show what the map does not cover."""
    low, extent = seen.covered[:2, None, None], seen.covered[2:, None, None]
    beyond: NDArray[np.bool_] = ((seen.shown < low) | (seen.shown > low + extent)).any(axis=0)
    return beyond


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cells", [9, 14, 18])
def test_labels_are_those_of_the_pixels_places(tmp_path: Path, geometry: MapGeometry, cells: int) -> None:
    folders = coded_set(tmp_path, geometry, cells)
    batch = one_batch(*folders, geometry, hflip=0.5, vflip=0.5)
    right = np.stack([errors(seen, cells) for seen in batch])
    # A few hundredths are the codes' coarseness; where a token lies across the map's edge it is more, but
    # less than half of the token.
    assert right.mean() < 0.06
    assert right.max() < 0.5
    wrong = np.stack([errors(seen, cells) for seen in one_batch(*folders, WHOLE, hflip=0.5, vflip=0.5)])
    if geometry == WHOLE:
        assert np.array_equal(wrong, right)
        return
    # The same measure must notice maps that are read as if they covered whole images.
    assert wrong.mean() > 0.5
    assert (wrong > 1).mean() > 0.15
    # Of the smaller maps, many tokens show what they do not cover; of those with borders, long images.
    assert np.mean([is_beyond(seen).mean() for seen in batch]) > 0.04


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_labels_move_with_turned_sheared_and_shifted_images(
    tmp_path: Path, geometry: MapGeometry, randaugment_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with geometric operations in three layers, and the colour-changing ones left out."""

    def geometric_only(*arguments: Any) -> Operations:
        drawn = draw_operations(*arguments)
        return replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))

    monkeypatch.setattr(stream_module, "draw_operations", geometric_only)
    folders = coded_set(tmp_path, geometry, 18)
    settings = {"aa": "rand-m9-n3-p1-mstd0.5-inc1", "hflip": 0.5, "vflip": 0.5}
    settings["randaugment_on"] = randaugment_on

    def found(read_as: MapGeometry) -> NDArray[np.float64]:
        batch = one_batch(*folders, read_as, **settings)
        return np.concatenate([errors(seen, 18)[~seen.blank] for seen in batch])

    # A map moves by whole cells; beside what is filled a cell may know nothing.
    right = found(geometry)
    assert len(right) > IMAGES * TOKENS**2 / 2
    assert right.mean() < 0.2
    assert (right > 1).mean() < 0.02
    if geometry != WHOLE:
        assert (found(WHOLE) > 1).mean() > 0.15
    if geometry == PUBLISHED:  # the same measure must notice what is lost where maps are not widened
        monkeypatch.setattr(
            stream_module, "moved_frames", lambda boxes, _: np.tile(UNWIDENED, (len(boxes), 1))
        )
        # Where the whole image is turned, less of what a crop shows comes from beyond the map.
        assert (found(geometry) > 1).mean() > (0.08 if randaugment_on == "crop" else 0.05)
