"""Cropped and flipped pixels, flipped label maps and crop boxes of a batch refer to the same positions.

Colours encode the position of a pixel in the stored image, and the class number of a map's cell is the
number of the cell. TrainLoader augments both; the maps and boxes of the batch must describe its images.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from coded_images import PLAIN, only_batch, position_coded, smooth, unnormalised, write_images
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.data import loader as loader_module
from horovod_volo.data.augmentation import label_map_ops
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.token_labels.source import open_labels

SIDE = 48
ROWS, COLUMNS = 6, 9  # cells of a label map
SIZES = [(160, 100), (97, 151), (64, 64), (210, 45)]  # width, height
IMAGES = 32


def one_batch(folder, maps_folder=None, **settings):
    """Return the catalog and the batch of an epoch with a single batch; each cell of a map has a class."""
    classes = ("a", *(f"cell {number}" for number in range(1, ROWS * COLUMNS)))
    catalog = build_catalog(str(folder), "train", None)
    catalog.classes = classes
    batch = only_batch(
        catalog,
        None if maps_folder is None else open_labels(str(maps_folder), catalog, None),
        Data(batch_size=len(catalog), **(PLAIN | settings)),
        side=SIDE,
        seed=11,
    )
    return catalog, batch


def stored_size(catalog, index):
    with Image.open(catalog.location(index)) as image:
        return np.array([image.height, image.width])


def coded_folder(folder, ending, **options):
    images = {
        f"train/a/{number:02d}.{ending}": position_coded(*SIZES[number % len(SIZES)])
        for number in range(IMAGES)
    }
    return write_images(folder, images, **options)


def positions_shown(batch, number):
    """Decode the colours of one image: row and column of each pixel in the stored image, as fractions."""
    colours = unnormalised(batch.images)[number]
    return colours[1] / 255, colours[0] / 255


def positions_in_box(box):
    """Return row and column of each output pixel in the flipped image, as fractions of the sides."""
    top, left, height, width = box
    steps = (np.arange(SIDE) + 0.5) / SIDE
    return np.meshgrid(top + height * steps, left + width * steps, indexing="ij")


@pytest.mark.parametrize(
    ("ending", "options", "colour_steps"),
    [("png", {}, 1), ("jpg", {"quality": 100, "subsampling": 0}, 3)],
)
def test_pixels_are_at_the_drawn_positions(tmp_path, ending, options, colour_steps):
    """Up to half a pixel at the edges of a crop, and the resolution of the colours."""
    catalog, batch = one_batch(coded_folder(tmp_path, ending, **options), hflip=0.5, vflip=0.5)
    combinations = set()
    for number, index in enumerate(batch.indices):
        size = stored_size(catalog, index)
        crop_flip = draw_crops(11, 0, np.array([index]), size[None], Data(hflip=0.5, vflip=0.5))
        horizontal, vertical = bool(crop_flip.flip_horizontal[0]), bool(crop_flip.flip_vertical[0])
        combinations.add((horizontal, vertical))
        top, left, height, width = crop_flip.boxes[0]
        rows = top + height * (np.arange(SIDE) + 0.5) / SIDE
        columns = left + width * (np.arange(SIDE) + 0.5) / SIDE
        if vertical:
            rows = size[0] - rows
        if horizontal:
            columns = size[1] - columns
        shown_rows, shown_columns = positions_shown(batch, number)
        tolerance = 0.55 + colour_steps / 255 * size  # in pixels of the stored image, rows and columns
        assert np.abs(shown_rows * size[0] - rows[:, None]).max() < tolerance[0]
        assert np.abs(shown_columns * size[1] - columns[None, :]).max() < tolerance[1]
    assert combinations == {(False, False), (False, True), (True, False), (True, True)}


def coded_label_maps(folder):
    """Write one map for each image; the class number of a cell is row * COLUMNS + column."""
    cells = torch.arange(ROWS * COLUMNS).reshape(1, ROWS, COLUMNS).half()
    (folder / "a").mkdir(parents=True)
    for number in range(IMAGES):
        torch.save(torch.stack([cells / 8, cells]), folder / "a" / f"{number:02d}.pt")
    return folder


def cell_distances(cells, batch, number):
    """Return the distance of each pixel's position from the centre of its cell by the box, in cells."""
    rows, columns = positions_in_box(batch.labels.maps.boxes[number].numpy())
    at_box = cells[(rows * ROWS).astype(int), (columns * COLUMNS).astype(int)]
    shown_rows, shown_columns = positions_shown(batch, number)
    row_distance = np.abs(shown_rows * ROWS - (at_box // COLUMNS + 0.5))
    column_distance = np.abs(shown_columns * COLUMNS - (at_box % COLUMNS + 0.5))
    return np.maximum(row_distance, column_distance)


@pytest.mark.parametrize(("hflip", "vflip"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_cells_of_the_box_are_those_of_the_pixels(tmp_path, hflip, vflip):
    folder = coded_folder(tmp_path / "images", "png")
    label_maps = coded_label_maps(tmp_path / "maps")
    _, batch = one_batch(folder, label_maps, hflip=hflip, vflip=vflip)
    assert batch.labels.maps.scores.shape == batch.labels.maps.ids.shape == (IMAGES, 1, ROWS, COLUMNS)
    assert (batch.labels.maps.scores == batch.labels.maps.ids / 8).all()
    unflipped = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    wrong = 0
    for number in range(IMAGES):
        # A pixel is within half a cell of its cell's centre, plus half a pixel and one level of the colour.
        assert cell_distances(batch.labels.maps.ids[number, 0].numpy(), batch, number).max() < 0.5 + 0.15
        wrong += cell_distances(unflipped, batch, number).max() > 0.65
    if hflip + vflip > 0:  # the measure must detect maps that were not moved
        assert wrong > IMAGES / 4
    else:
        assert wrong == 0


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
def test_labels_move_with_rotated_sheared_and_translated_images(tmp_path, monkeypatch, randaugment_on):
    """As above, with geometric operations in both layers and without colour operations."""

    def geometric_only(*arguments):
        drawn = draw_operations(*arguments)
        return replace(drawn, kinds=np.where(np.isin(drawn.kinds, ops.GEOMETRIC), drawn.kinds, ops.NONE))

    monkeypatch.setattr(loader_module, "draw_operations", geometric_only)
    folder = coded_folder(tmp_path / "images", "png")
    settings = {"aa": "rand-m9-n3-p1-mstd0.5-inc1", "hflip": 0.5, "vflip": 0.5}
    settings["randaugment_on"] = randaugment_on
    _, batch = one_batch(folder, coded_label_maps(tmp_path / "maps"), **settings)
    filled = np.abs(unnormalised(batch.images) - np.array(FILL)[:, None, None]).max(axis=1) < 1
    # Next to filled pixels, later operations blend the fill colour into the colours that encode positions.
    filled = torch.nn.functional.max_pool2d(torch.from_numpy(filled).float(), 5, 1, padding=2).numpy() > 0
    operations = geometric_only(11, 0, batch.indices, Data(**(PLAIN | settings)))
    assert operations.geometric.sum() > IMAGES / 3
    moved_right, unmoved = [], []
    unmoved_batch = batch_with_unwarp_maps(tmp_path, folder, monkeypatch, settings)
    for number in np.flatnonzero(operations.geometric):
        shown = ~filled[number]
        for batches, found in ((batch, moved_right), (unmoved_batch, unmoved)):
            distances = cell_distances(batches.labels.maps.ids[number, 0].numpy(), batch, number)
            found.append((distances[shown] <= 1.0).mean())
    # Half a cell to the centre of the cell, and up to half a cell because maps move by whole cells.
    assert np.mean(moved_right) > 0.95
    assert min(moved_right) > 0.8
    assert np.mean(unmoved) < 0.75  # the measure must detect maps that were not moved


def batch_with_unwarp_maps(tmp_path, folder, monkeypatch, settings):
    monkeypatch.setattr(label_map_ops, "warp_maps", lambda scores, ids, *_: (scores, ids))
    return one_batch(folder, tmp_path / "maps", **settings)[1]


def test_without_label_maps_there_are_no_labels(tmp_path):
    _, batch = one_batch(coded_folder(tmp_path, "png"))
    assert batch.labels.maps is None


def test_pixels_equal_pils(tmp_path):
    """Flip, then crop, then PIL's bicubic resize, of JPEG images that are enlarged and reduced."""
    images = {f"train/a/{n}.jpg": smooth(*SIZES[n % len(SIZES)], seed=n) for n in range(8)}
    catalog, batch = one_batch(write_images(tmp_path, images, quality=95), hflip=0.5, vflip=0.5)
    colours = unnormalised(batch.images)
    for number, index in enumerate(batch.indices):
        size = stored_size(catalog, index)
        crop_flip = draw_crops(11, 0, np.array([index]), size[None], Data(hflip=0.5, vflip=0.5))
        with Image.open(catalog.location(index)) as image:
            if crop_flip.flip_horizontal[0]:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            if crop_flip.flip_vertical[0]:
                image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
            top, left, height, width = crop_flip.boxes[0].tolist()
            cut = image.crop((left, top, left + width, top + height))
            theirs = np.asarray(cut.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=float)
        difference = np.abs(colours[number].transpose(1, 2, 0) - theirs)
        assert difference.mean() < 0.5
        assert difference.max() < 6
