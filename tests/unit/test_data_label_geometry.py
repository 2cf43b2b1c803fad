"""The geometry of label maps: parsed, recorded, and assumed with a warning where nothing is recorded."""

import itertools
import json

import numpy as np
import pytest
import torch
from coded_images import position_coded
from label_samples import catalog_of, make_store, publish

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from torchvision.transforms.functional import center_crop, resize

from horovod_volo.config.schema import Config, Objective
from horovod_volo.core.errors import UserError
from horovod_volo.engine.classification_data import map_geometry
from horovod_volo.labels import main
from horovod_volo.token_labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.published_maps import PublishedMaps
from horovod_volo.token_labels.source import map_warnings, open_labels
from horovod_volo.token_labels.store import LabelStore

NAMES = tuple(f"{name}/{number}.jpg" for name in "ab" for number in range(2))


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


@pytest.mark.parametrize("text", ["Whole", "centre-crop:576", "centre-crop:0:576", "centre-crop:576:-1"])
def test_other_spellings_are_refused(text):
    with pytest.raises(UserError, match=r"Give --map-geometry whole, or centre-crop:RESIZE:SIZE"):
        MapGeometry.parse(text)


@pytest.mark.parametrize("resize_to", [96, 73])
@pytest.mark.parametrize("size", [96, 73, 64, 110, 131])
def test_the_covered_box_is_the_crop_of_torchvision(resize_to, size):
    """The pixels of the images encode their positions: those of the crop must agree with the box.

    The tolerance is half a level of 255. Pixels at the edges, which the resize filter blends, are left out.
    """
    for height, width in itertools.product([67, 100, 211], [80, 201]):
        image = torch.from_numpy(np.array(position_coded(width, height))).permute(2, 0, 1).float()
        crop = center_crop(resize(image, resize_to, antialias=True), size).numpy() / 255
        ((top, left, tall, wide),) = MapGeometry(resize_to, size).covered(np.array([[height, width]]))
        steps = (np.arange(size) + 0.5) / size
        for expected, shown in ((top + tall * steps, crop[1]), (left + wide * steps, crop[0].T)):
            inside = (expected > 0.02) & (expected < 0.98)
            middle = shown[:, size // 2]
            assert np.abs(middle - expected)[inside].max() < 0.5 / 255 + 0.002
            assert (middle[(expected < 0) | (expected > 1)] == 0).all()


def test_published_maps_are_assumed_to_be_centre_crops(tmp_path, catalog):
    folder = str(publish(tmp_path / "maps", catalog, height=3, width=3))
    maps = PublishedMaps(folder, catalog)
    assert (maps.geometry, maps.geometry_assumed) == (PUBLISHED, True)
    (warning,) = map_warnings(folder, maps)
    assert "assumed to cover the image's centre crop (centre-crop:576:576): the published" in warning
    assert "State it with --map-geometry" in warning
    stated = open_labels(folder, catalog, None, WHOLE)
    assert (stated.geometry, map_warnings(folder, stated)) == (WHOLE, [])
    assert map_geometry(Config(objective=Objective(label_geometry="reference"))) == WHOLE


def test_maps_that_are_not_square_are_assumed_to_cover_whole_images(tmp_path, catalog):
    maps = PublishedMaps(publish(tmp_path / "maps", catalog, height=3, width=4), catalog)
    assert (maps.geometry, maps.geometry_assumed) == (WHOLE, True)
    assert "maps of a centre crop are square, and these are not" in map_warnings("maps", maps)[0]


def test_a_folder_may_record_the_geometry(tmp_path, catalog):
    folder = publish(tmp_path / "maps", catalog, height=3, width=3)
    (folder / "map_geometry.txt").write_text("centre-crop:256:224\n")
    maps = PublishedMaps(folder, catalog)
    assert (maps.geometry, maps.geometry_assumed) == (MapGeometry(256, 224), False)
    stated = open_labels(str(folder), catalog, None, WHOLE)
    assert map_warnings("maps", stated) == [
        "the label maps in maps are recorded to cover the image's centre crop (centre-crop:256:224), but "
        "--map-geometry says the whole image"
    ]
    assert map_warnings("maps", open_labels(str(folder), catalog, None, MapGeometry(256, 224))) == []
    (folder / "map_geometry.txt").write_text("center\n")
    with pytest.raises(UserError, match=r"map_geometry\.txt: 'center' is not a geometry"):
        PublishedMaps(folder, catalog)


@pytest.mark.parametrize(
    ("arguments", "recorded", "assumed"),
    [
        ([], "centre-crop:576:576", True),
        (["--map-geometry", "whole"], "whole", False),
        (["--map-geometry", "centre-crop:256:224"], "centre-crop:256:224", False),
    ],
)
def test_an_import_records_the_geometry(tmp_path, catalog, arguments, recorded, assumed, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "maps", catalog, height=3, width=3)
    assert main(["import", "maps", "s", "--data", ".", "--workers", "1", *arguments]) == 0
    assert ("warning: a label map in s is assumed to cover" in capsys.readouterr().err) == assumed
    store = LabelStore("s", catalog, None)
    assert (str(store.geometry), store.geometry_assumed) == (recorded, assumed)


@pytest.mark.parametrize(
    ("written", "shape", "read"),
    [
        ("unknown", (3, 3), "centre-crop:576:576"),
        ("unknown", (3, 4), "whole"),
        ("centre-crop", (3, 3), "centre-crop:576:576"),
    ],
)
def test_a_store_without_a_recorded_geometry_gets_the_assumed_one(tmp_path, catalog, written, shape, read):
    """Earlier versions wrote no `geometry_assumed`, no checksum, and "unknown" for imported maps."""
    ids = np.zeros((4, 1, *shape), np.int64)
    scores = np.ones(ids.shape, np.float16)
    make_store(tmp_path / "s", catalog_keys(catalog), scores, ids, classes=2, teacher="unknown")
    description = tmp_path / "s" / "store.json"
    metadata = json.loads(description.read_text())
    del metadata["geometry_assumed"], metadata["checksum"]
    description.write_text(json.dumps(metadata))
    store = LabelStore(tmp_path / "s", catalog, None)
    assert (store.geometry, store.geometry_assumed) == (WHOLE, False)
    description.write_text(json.dumps(metadata | {"geometry": written}))
    store = LabelStore(tmp_path / "s", catalog, None)
    assert (str(store.geometry), store.geometry_assumed) == (read, True)
    assert len(map_warnings("s", store)) == 1
